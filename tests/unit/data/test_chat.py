"""Tokens of prompts, with the committed tiny tokenizer and variants of it made here."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

import titan_rl
from titan_rl.data.chat import LengthReport, PromptEncoder, check_prompts
from titan_rl.data.cursor import PromptStream
from titan_rl.data.datasets import fingerprint_prompts
from titan_rl.errors import ConfigError
from titan_rl.types import Message, Prompt

TINY = Path(titan_rl.__file__).parent / "assets" / "tiny_llama"
BOS, EOS, UNK, SYSTEM, USER, ASSISTANT = 1, 2, 3, 4, 5, 6


def char(character):
    """Id of a character: 7 special tokens, line feed, tab, then ASCII from the space on."""
    return 7 if character == "\n" else ord(character) - 32 + 9


def chars(text):
    return [char(character) for character in text]


def encoder(directory=TINY, **options):
    return PromptEncoder(directory, **{"system_prompt": None, "max_prompt_tokens": 64, **options})


def user(text, name="p", answer=None):
    return Prompt(name, (Message("user", text),), answer=answer)


@pytest.fixture
def variant(tmp_path):
    """Returns a function that copies the tiny tokenizer and changes files of the copy."""

    def make(*, template=True, front=None, back=None, **files):
        shutil.copytree(TINY, tmp_path / "tokenizer")
        path = tmp_path / "tokenizer"
        if template is not True:
            config = json.loads((path / "tokenizer_config.json").read_text())
            config.pop("chat_template")
            if template:
                config["chat_template"] = template
            (path / "tokenizer_config.json").write_text(json.dumps(config))
        if front or back:
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
            tokenizer.post_processor = processors.TemplateProcessing(
                single=" ".join(part for part in (front, "$A", back) if part),
                special_tokens=[("<bos>", BOS), ("<eos>", EOS)],
            )
            tokenizer.save(str(path / "tokenizer.json"))
        for name, content in files.items():
            (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return make


def test_the_chat_template_renders_messages_and_the_start_of_the_reply():
    messages = [Message("user", "Hi"), Message("assistant", "Yo"), Message("user", "1+1")]
    expected = [BOS, USER, *chars("Hi"), ASSISTANT, *chars("Yo"), EOS, USER, *chars("1+1"), ASSISTANT]
    assert encoder().encode(messages) == expected


def test_the_system_prompt_goes_first_unless_the_messages_bring_one():
    with_system = encoder(system_prompt="Be")
    start = [BOS, SYSTEM, *chars("Be"), USER, *chars("a"), ASSISTANT]
    assert with_system.encode([Message("user", "a")]) == start
    own = [Message("system", "No"), Message("user", "a")]
    assert with_system.encode(own) == [BOS, SYSTEM, *chars("No"), USER, *chars("a"), ASSISTANT]


def test_without_a_chat_template_the_contents_are_joined_by_an_empty_line(variant):
    plain = encoder(variant(template=None), system_prompt="S")
    assert not plain.uses_chat_template
    assert plain.encode([Message("user", "2 + 3 =")]) == chars("S\n\n2 + 3 =")


def test_the_template_can_be_switched_off():
    assert encoder(use_chat_template=False).encode([Message("user", "2 + 3 =")]) == chars("2 + 3 =")


def test_a_tokenizer_that_adds_special_tokens_adds_bos_once_and_never_closes_the_prompt(variant):
    path = variant(front="<bos>", back="<eos>")
    assert encoder(path).encode([Message("user", "a")]) == [BOS, USER, char("a"), ASSISTANT]
    assert encoder(path, use_chat_template=False).encode([Message("user", "a")]) == [BOS, char("a")]


def test_variables_reach_the_template(variant):
    path = variant(template="{{ messages[0].content }}{% if thinking %}+{% endif %}")
    assert encoder(path, template_kwargs={"thinking": True}).encode([Message("user", "a")]) == chars("a+")
    assert encoder(path).encode([Message("user", "a")]) == chars("a")


def test_decoding_returns_the_text_without_special_tokens():
    text = "3 * (4 - 1) = 9 ,\n\tok ."
    coder = encoder(use_chat_template=False)
    assert coder.decode([BOS, *coder.encode([Message("user", text)]), EOS]) == text


def test_an_unknown_character_is_one_unknown_token():
    assert encoder(use_chat_template=False).encode([Message("user", "aéb")]) == [char("a"), UNK, char("b")]


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({}, (EOS,)),
        ({"generation_config": {"eos_token_id": 50}}, (EOS, 50)),
        ({"generation_config": {"eos_token_id": [50, EOS, 40]}}, (EOS, 40, 50)),
        ({"generation_config": {"eos_token_id": None}, "config": {"model_type": "llama", "eos_token_id": 60}},
         (EOS, 60)),
        ({"config": {"model_type": "llama", "text_config": {"eos_token_id": [61]}}}, (EOS, 61)),
    ],
)  # fmt: skip
def test_stop_tokens_come_from_tokenizer_generation_config_and_model_config(variant, files, stops):
    assert encoder(variant(**files)).stop_token_ids == stops


@pytest.mark.parametrize(
    "content", ["{", {"eos_token_id": "2"}, {"eos_token_id": [True]}, {"eos_token_id": -1}]
)
def test_stop_tokens_that_cannot_be_read_are_an_error(variant, content):
    with pytest.raises(ConfigError, match=r"generation_config\.json.* must be"):
        encoder(variant(generation_config=content))


def test_the_vocabulary_has_104_tokens():
    assert encoder().vocab_size == 104


def test_a_supervised_sequence_trains_the_answer_and_its_end_only():
    ids, loss_mask = encoder(use_chat_template=False).encode_with_answer(user("2 + 3 =", answer="5!"))
    assert ids == [*chars("2 + 3 =5!"), EOS]
    assert loss_mask == [False] * 7 + [True] * 3


def test_a_supervised_sequence_begins_with_the_tokens_of_the_prompt(variant):
    coder = encoder(variant(front="<bos>", back="<eos>"), system_prompt="S")
    prompt = user("2 + 3 =", answer="5")
    ids, loss_mask = coder.encode_with_answer(prompt)
    start = coder.encode(prompt.messages)
    assert ids == [*start, char("5"), EOS]
    assert loss_mask == [False] * len(start) + [True, True]


def test_a_supervised_sequence_needs_an_answer():
    with pytest.raises(ConfigError, match="Prompt p must have a reference answer"):
        encoder().encode_with_answer(user("a"))


CONVERSATION = Prompt(
    "p",
    (Message("user", "1+1"), Message("assistant", "2"), Message("user", "+3"), Message("assistant", "")),
    answer="55",
)


def test_every_assistant_turn_is_trained_with_its_end_and_nothing_else():
    ((ids, loss_mask),) = encoder().encode_conversation(CONVERSATION)
    turns = [BOS, USER, *chars("1+1"), ASSISTANT, char("2"), EOS, USER, *chars("+3"), ASSISTANT, EOS]
    assert ids == [*turns, ASSISTANT, *chars("55"), EOS]
    trained = [index for index, is_trained in enumerate(loss_mask) if is_trained]
    assert [ids[index] for index in trained] == [char("2"), EOS, EOS, *chars("55"), EOS]
    assert trained[1] == trained[0] + 1 == 7


def test_each_reply_of_a_conversation_stands_behind_the_tokens_that_the_policy_would_see():
    coder = encoder(system_prompt="S")
    ((ids, loss_mask),) = coder.encode_conversation(CONVERSATION)
    for count in (1, 3, 4):
        before = coder.encode(CONVERSATION.messages[:count])
        assert ids[: len(before)] == before
        assert count == 4 or loss_mask[len(before)]


def test_a_template_that_renders_earlier_turns_anew_gives_one_sequence_per_reply(variant):
    # Earlier replies are shortened to their last character, as templates shorten reasoning.
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'][-1:] if m['role'] == 'assistant' "
        "else m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}<assistant>"
    )
    prompt = Prompt("p", (Message("user", "a"), Message("assistant", "xyz"), Message("user", "b")), "w")
    coder = encoder(variant(template=template))
    first, second = coder.encode_conversation(prompt)
    assert first == ([USER, char("a"), ASSISTANT, *chars("xyz"), EOS], [False] * 3 + [True] * 4)
    ids = [USER, char("a"), ASSISTANT, char("z"), EOS, USER, char("b"), ASSISTANT, char("w"), EOS]
    assert second == (ids, [False] * 8 + [True] * 2)
    kept = Prompt("p", (Message("user", "a"), Message("assistant", "x"), Message("user", "b")), "w")
    assert len(coder.encode_conversation(kept)) == 1


def test_without_a_mark_of_its_end_a_reply_does_not_run_into_the_next_turn(variant):
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    prompt = Prompt("p", (Message("user", "a"), Message("assistant", "x"), Message("user", "b")), "w")
    first, second = encoder(variant(template=template)).encode_conversation(prompt)
    assert first[0] == [USER, char("a"), ASSISTANT, char("x"), EOS]
    assert second[0] == [USER, char("a"), ASSISTANT, char("x"), USER, char("b"), ASSISTANT, char("w"), EOS]
    assert sum(second[1]) == 2


@pytest.mark.parametrize("template", [True, False])
def test_one_turn_or_no_template_gives_the_sequence_of_the_answer(template):
    coder = encoder(use_chat_template=template)
    single = user("1+1", answer="2")
    assert coder.encode_conversation(single) == [coder.encode_with_answer(single)]
    if not template:
        assert coder.encode_conversation(CONVERSATION) == [coder.encode_with_answer(CONVERSATION)]
    with pytest.raises(ConfigError, match="Prompt p must have a reference answer"):
        coder.encode_conversation(user("a"))


def test_the_length_of_a_prompt_counts_every_token_of_the_template():
    assert encoder().num_tokens([user("ab"), user("abc")]) == [5, 6]  # <bos> <user> a b <assistant>


def test_the_fingerprint_follows_files_and_settings(variant):
    prints = {
        encoder().fingerprint,
        encoder(system_prompt="S").fingerprint,
        encoder(use_chat_template=False).fingerprint,
        encoder(template_kwargs={"x": 1}).fingerprint,
        encoder(variant(front="<bos>")).fingerprint,
    }
    assert len(prints) == 5
    assert encoder(max_prompt_tokens=1).fingerprint == encoder().fingerprint


def test_a_template_that_refuses_the_roles_is_an_error(variant):
    path = variant(template="{{ raise_exception('no system role') }}")
    with pytest.raises(ConfigError, match=r"must accept the messages .* got system, user \(no system role\)"):
        encoder(path, system_prompt="S").encode([Message("user", "a")])


def test_a_prompt_without_tokens_is_an_error():
    with pytest.raises(ConfigError, match="must have at least one token"):
        encoder(use_chat_template=False).encode([Message("user", "")])


def test_a_template_that_is_asked_for_must_exist(variant):
    with pytest.raises(ConfigError, match="use_chat_template must be false"):
        encoder(variant(template=None), use_chat_template=True)


def test_a_directory_without_a_tokenizer_is_an_error(tmp_path, variant):
    with pytest.raises(ConfigError, match="The tokenizer directory must exist"):
        encoder(tmp_path / "nowhere")
    (tmp_path / "bare").mkdir()
    with pytest.raises(ConfigError, match="bare must hold a tokenizer that transformers can load"):
        encoder(tmp_path / "bare")
    with pytest.raises(ConfigError, match="must hold a tokenizer that transformers can load"):
        encoder(variant(tokenizer='{"model": 3'))
    with pytest.raises(ConfigError, match="max_prompt_tokens must be at least 1; got 0"):
        encoder(max_prompt_tokens=0)


class Words:
    """One prompt per word."""

    name = "words"

    def __init__(self, words):
        self._words = words
        self.fingerprint = fingerprint_prompts(self[i] for i in range(len(words)))

    def __len__(self):
        return len(self._words)

    def __getitem__(self, index, /):
        return user(self._words[index], name=f"words/{index}")


def test_prompts_that_all_fit_leave_the_dataset_as_it_is():
    data = Words(["a", "bb"])
    checked, report = check_prompts(data, encoder(max_prompt_tokens=5), too_long="error")
    assert checked is data
    assert report == LengthReport(num_prompts=2, num_too_long=0)


def test_skipping_removes_exactly_the_prompts_that_are_too_long_in_every_batch():
    words = ["x" * (1 + number % 7) for number in range(1100)]  # three batches
    data = Words(words)
    coder = encoder(max_prompt_tokens=6)  # at most 3 characters
    checked, report = check_prompts(data, coder, too_long="skip")
    kept = [f"words/{number}" for number, word in enumerate(words) if len(word) <= 3]
    assert [checked[i].id for i in range(len(checked))] == kept
    assert report == LengthReport(1100, 1100 - len(kept))
    assert max(coder.num_tokens(PromptStream(checked, seed=0).take(0, 50))) == 6
    again, _ = check_prompts(Words(words), encoder(max_prompt_tokens=6), too_long="skip")
    other, _ = check_prompts(data, encoder(max_prompt_tokens=7), too_long="skip")
    assert checked.fingerprint == again.fingerprint
    assert len({checked.fingerprint, other.fingerprint, data.fingerprint}) == 3


def test_prompts_that_are_too_long_are_counted_in_the_error():
    message = (
        r"Every prompt of words must have at most max_prompt_tokens = 4 tokens; got 2 of 3 .*first: words/1"
    )
    with pytest.raises(ConfigError, match=message):
        check_prompts(Words(["a", "bb", "cc"]), encoder(max_prompt_tokens=4), too_long="error")
    with pytest.raises(ConfigError, match=r"Some prompt of words must have .* got 2 of 2 longer"):
        check_prompts(Words(["bb", "cc"]), encoder(max_prompt_tokens=4), too_long="skip")
