"""SmolLM2-135M under FSDP 1 and 2: logits against transformers in fp32, and both against float64.

Logits are compared within 1e-3. How far fp32 is from float64 is rounding, and differs from text to text by
more than the implementations do: errors are pooled over texts, and compared within two standard errors of
their ratio.
"""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.distributed import launching, smollm2_worker

pytestmark = pytest.mark.slow

TOLERANCE = 1e-3
TEXTS = (
    "What is 12 + 30? The answer is 42, because adding the tens gives 40 and the ones give 2.",
    "<|im_start|>user\n17+25<|im_end|>\n<|im_start|>assistant\n42<|im_end|>\n",
    "The river had frozen over in the night, and nobody in the village could remember a colder spring.",
    "def mean(values):\n    return sum(values) / len(values)\n\nprint(mean([1, 2, 3, 4]))\n",
    "Photosynthesis turns carbon dioxide and water into sugar and oxygen with the energy of light.",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597",
    "Dear Dr. Alvarez, thank you for your letter of 3 March; the samples arrived without any damage.",
    "In 1869 Mendeleev arranged the elements by weight and left gaps for those yet to be found.",
    "To be, or not to be, that is the question: whether it is nobler in the mind to suffer",
    "SELECT name, COUNT(*) FROM visits WHERE year >= 2020 GROUP BY name ORDER BY 2 DESC LIMIT 10;",
    "Mix two eggs with a cup of flour, add milk until it runs off the spoon, and let it rest.",
    "If every swan that we have seen is white, does it follow that the next one will be white too?",
    "The train to the coast leaves at 7:45 from platform 3 and takes a little under two hours.",
    "x^2 - 5x + 6 = 0 has the roots 2 and 3, since their sum is 5 and their product is 6.",
    "Once upon a time there was a miller who had three sons, a mill, a donkey and a cat.",
    "Le chat dort sur le canapé pendant que la pluie tombe doucement sur les toits de la ville.",
    '<p class="note">Prices include <b>taxes</b> but not the <a href="/fees">booking fee</a>.</p>',
    "Water boils at 100 degrees at sea level, but at only about 70 on top of Mount Everest.",
    "She opened the letter slowly, read it twice, and put it back without saying a word to him.",
    "A hash table finds a key in constant time on average; in the worst case it looks at them all.",
    "Name: Ada Lovelace\nBorn: 10 December 1815\nKnown for: notes on the Analytical Engine\n",
    "Bees dance to tell the others how far away the flowers are, and in which direction from the sun.",
    "for (int i = 0; i < n; ++i) { total += prices[i] * quantities[i]; }",
    "Nothing in the universe travels faster than light, and so to look far away is to look back in time.",
)

Logits = list[torch.Tensor]
"""Of each text, ``[T, V]``."""


@pytest.fixture(scope="module")
def logits(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Logits]]:
    """By who computed them: "one" rank, "two" ranks, transformers' "eager" and "sdpa", and "exact"."""
    directory = tmp_path_factory.mktemp("logits")
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    texts = [tokenizer.encode(text).ids for text in TEXTS]
    (directory / "texts.json").write_text(json.dumps([str(smollm2_dir), texts]))
    launching.compute(smollm2_worker, directory)
    ours: dict[str, dict[str, torch.Tensor]] = {"one": {}, "two": {}}
    for name, size in (("one", 1), ("two", 2)):
        for path in directory.glob(f"world{size}.rank*.safetensors"):
            ours[name] |= load_file(path)
    found = {name: [of[str(i)] for i in range(len(TEXTS))] for name, of in ours.items()}
    for path in ("eager", "sdpa"):
        model = LlamaForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32, attn_implementation=path)
        found[path] = of_transformers(model, texts)
    found["exact"] = of_transformers(in_float64(smollm2_dir), texts)
    return found


def of_transformers(model: LlamaForCausalLM, texts: Sequence[Sequence[int]]) -> Logits:
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0] for ids in texts]


def in_float64(model_dir: Path) -> LlamaForCausalLM:
    """transformers' model with everything in float64: by itself it keeps norms and angles in fp32."""
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = _norm.__get__(module)
    config = model.config
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_parameters["rope_theta"] ** -exponents

    def angles(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = position_ids[..., None].double() * frequencies
        found = torch.cat([found, found], dim=-1)
        return found.cos(), found.sin()

    model.model.rotary_emb.forward = angles
    return model


def _norm(self: LlamaRMSNorm, x: torch.Tensor) -> torch.Tensor:
    assert x.dtype == torch.float64
    return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))


def rms_errors(found: Logits, exact: Logits) -> list[float]:
    """Root mean square over the logits of each text."""
    return [(a.double() - b).square().mean().sqrt().item() for a, b in zip(found, exact, strict=True)]


def pooled(errors: Sequence[float], lengths: Sequence[int]) -> float:
    """Over all logits of all texts."""
    squares = math.fsum(length * error**2 for error, length in zip(errors, lengths, strict=True))
    return math.sqrt(squares / sum(lengths))


def is_no_further(found: Logits, other: Logits, exact: Logits) -> bool:
    """Whether the pooled error is at most the other's, within two standard errors of their ratio."""
    errors, others = rms_errors(found, exact), rms_errors(other, exact)
    ratios = [math.log(a / b) for a, b in zip(errors, others, strict=True)]
    standard_error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    lengths = [len(one) for one in exact]
    print(f"{pooled(errors, lengths):.4g} against {pooled(others, lengths):.4g}, +- {standard_error:.3f}")
    return pooled(errors, lengths) <= pooled(others, lengths) * math.exp(2 * standard_error)


def worse(logits: dict[str, Logits]) -> Logits:
    """Those of transformers' attention paths that lie further from float64."""
    lengths = [len(one) for one in logits["exact"]]
    paths = (logits["eager"], logits["sdpa"])
    return max(paths, key=lambda found: pooled(rms_errors(found, logits["exact"]), lengths))


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_logits_equal_those_of_transformers(logits, ranks):
    for ours, theirs in zip(logits[ranks], logits["sdpa"], strict=True):
        assert theirs.std() > 1
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_they_are_no_further_from_float64_than_transformers_is(logits, ranks):
    assert is_no_further(logits[ranks], worse(logits), logits["exact"])


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_an_error_that_is_a_fifth_larger_is_noticed(logits, ranks):
    exact = logits["exact"]
    larger = [right + 1.2 * (ours - right) for ours, right in zip(logits[ranks], exact, strict=True)]
    assert not is_no_further(larger, worse(logits), exact)
