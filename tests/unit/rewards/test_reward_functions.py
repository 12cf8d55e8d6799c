"""The built-in rewards against values worked out by hand."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import make_rollout

from titan_rl.errors import ConfigError, RewardError
from titan_rl.rewards.exact_match import ExactMatch
from titan_rl.rewards.format import Format
from titan_rl.rewards.length import Length
from titan_rl.rewards.math_verify import MathVerify
from titan_rl.rewards.numeric import Numeric, last_number, whole_number


@pytest.mark.parametrize(
    ("text", "answer", "ignore_case", "expected"),
    [
        ("Paris", "Paris", False, 1.0),
        ("  Paris\n", "Paris ", False, 1.0),
        ("paris", "Paris", False, 0.0),
        ("paris", "Paris", True, 1.0),
        ("STRASSE", "straße", True, 1.0),
        ("Paris.", "Paris", True, 0.0),
        ("", "", False, 1.0),
    ],
)
def test_exact_match_compares_stripped_texts(text, answer, ignore_case, expected):
    reward = ExactMatch(ExactMatch.Config(ignore_case=ignore_case))
    assert reward(make_rollout(text, answer=answer)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", Fraction(42)),
        (" -1,234,567.50 ", Fraction(-123456750, 100)),
        ("$1,000", Fraction(1000)),
        ("-$5", Fraction(-5)),
        ("\N{MINUS SIGN}7", Fraction(-7)),
        ("+.25", Fraction(1, 4)),
        ("3/4", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        (r"50\%", Fraction(50)),
        ("1{,}234", Fraction(1234)),
        ("1e3", Fraction(1000)),
        ("5.", Fraction(5)),
        ("0.1", Fraction(1, 10)),
        ("5 apples", None),
        ("1,2", None),
        ("1/0", None),
        ("", None),
    ],
)
def test_a_text_that_is_one_number_is_read_exactly(text, expected):
    assert whole_number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("48/2 = 24, so 48 + 24 = 72.", 72),
        ("It is 10-5", 5),
        ("It is 10 - 5", 5),
        ("x = -5", -5),
        ("x = - 5 degrees", -5),
        ("(1,2,3)", 3),
        ("about 12.5%", Fraction(25, 2)),
        ("She earned $1,000,000.00!", 1_000_000),
        ("no number", None),
        (r"so \frac{1}{3} remains", Fraction(1, 3)),
    ],
)
def test_the_last_number_of_a_text_is_found(text, expected):
    assert last_number(text) == expected


@settings(deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12))
def test_every_decimal_survives_thousands_separators(value):
    assert whole_number(f"{value:,}") == Fraction(value)
    assert last_number(f"The answer is {value:,}.") == Fraction(value)


def test_numbers_past_pythons_digit_limit_and_past_float_precision_are_compared_exactly():
    long = "9" * 5000
    reward = Numeric(Numeric.Config(number="whole"))
    assert reward(make_rollout(long, answer=long)) == 1.0
    assert reward(make_rollout(long[:-1] + "8", answer=long)) == 0.0
    assert reward(make_rollout("0.30000000000000004", answer="0.3")) == 0.0


@pytest.mark.parametrize(
    ("number", "text", "expected"),
    [
        ("whole", "72", 1.0),
        ("whole", "72 clips", 0.0),
        ("last", "first 48, then 72 clips", 1.0),
        ("last", "72 of 100", 0.0),
        ("after_marker", "48 + 24\n#### 72 clips, not 73", 1.0),
        ("after_marker", "#### 71 no #### $72.00", 1.0),
        ("after_marker", "72", 0.0),
        ("after_marker", "####", 0.0),
        ("boxed", r"\boxed{1} no, \boxed{\frac{144}{2}}.", 1.0),
        ("boxed", r"\boxed{72 clips}", 0.0),
        ("boxed", r"\boxed{72", 0.0),
        ("boxed", "72", 0.0),
    ],
)
def test_the_configuration_says_which_number_counts(number, text, expected):
    reward = Numeric(Numeric.Config(number=number))
    assert reward(make_rollout(text, answer="72")) == expected


def test_another_marker_can_be_set_and_gsm8k_answers_are_cut_at_theirs():
    reward = Numeric(Numeric.Config(number="after_marker", marker="Answer:"))
    assert reward(make_rollout("Answer: 72", answer="72")) == 1.0
    gsm8k = Numeric(Numeric.Config())
    assert gsm8k(make_rollout("72", answer="48/2 = 24\n48+24 = 72\n#### 72")) == 1.0


def test_numeric_refuses_an_answer_that_is_no_number_and_names_the_prompt():
    with pytest.raises(RewardError, match=r"train/7.*'many'"):
        Numeric(Numeric.Config())(make_rollout("5", answer="many"))


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (r"So the result is $\frac{1}{2}$.", "0.5", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1.0),
        (r"first \boxed{3}, the final answer is $4$.", "4", 1.0),
        ("5", "4", 0.0),
        (r"\boxed{x^2}", "$(x+1)^2$", 0.0),
        ("I do not know.", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_math_verify_judges_equivalence(text, answer, expected):
    assert MathVerify(MathVerify.Config())(make_rollout(text, answer=answer)) == expected


def test_math_verify_refuses_an_empty_answer_and_names_the_prompt():
    with pytest.raises(RewardError, match="train/7"):
        MathVerify(MathVerify.Config())(make_rollout("4", answer=""))


def test_math_verify_leaves_the_alarm_signal_alone():
    import signal

    before = signal.signal(signal.SIGALRM, lambda *_: None)
    ours = signal.getsignal(signal.SIGALRM)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1000.0)
        MathVerify(MathVerify.Config())(make_rollout("4"))
        assert signal.getsignal(signal.SIGALRM) is ours
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0  # their timeout would have cancelled it
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (r"<think>.*?</think>\s*<answer>.*?</answer>", "<think>a</think> <answer>4</answer>", 1.0),
        (r"<think>.*?</think>\s*<answer>.*?</answer>", "<think>a\nb</think><answer>4</answer>", 0.0),
        (r"(?s)<think>.*?</think>\s*<answer>.*?</answer>", "<think>a\nb</think><answer>4</answer>", 1.0),
        (r"\d+", "42 ", 0.0),
        (r"\d+", "4", 1.0),
    ],
)
def test_format_matches_the_whole_text(pattern, text, expected):
    assert Format(Format.Config(pattern=pattern))(make_rollout(text, answer=None)) == expected


def test_a_pattern_that_does_not_compile_is_a_config_error():
    with pytest.raises(ConfigError, match=r"reward.pattern must be a regular expression.*unterminated"):
        Format(Format.Config(pattern="(a"))


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (85, -0.25), (90, -0.5), (100, -1.0), (101, -1.0), (500, -1.0)],
)
def test_length_is_the_soft_overlong_punishment_of_dapo(num_tokens, expected):
    reward = Length(Length.Config(max_tokens=100, buffer_tokens=20))
    assert reward(make_rollout("x", num_tokens=num_tokens, answer=None)) == pytest.approx(expected, abs=1e-12)


def test_length_counts_the_tokens_of_all_turns():
    reward = Length(Length.Config(max_tokens=100, buffer_tokens=20))
    assert reward(make_rollout("x", num_tokens=45, num_turns=2)) == pytest.approx(-0.5)


def test_length_without_a_buffer_is_a_step():
    reward = Length(Length.Config(max_tokens=10, buffer_tokens=0))
    assert [reward(make_rollout("x", num_tokens=n)) for n in (9, 10, 11)] == [0.0, 0.0, -1.0]


@pytest.mark.parametrize(("limit", "buffer"), [(0, 0), (10, 11), (10, -1)])
def test_length_refuses_an_impossible_ramp(limit, buffer):
    with pytest.raises(ConfigError):
        Length(Length.Config(max_tokens=limit, buffer_tokens=buffer))


@pytest.mark.parametrize(
    "reward",
    [ExactMatch(ExactMatch.Config()), Numeric(Numeric.Config()), MathVerify(MathVerify.Config())],
    ids=["exact_match", "numeric", "math_verify"],
)
def test_a_prompt_without_an_answer_is_a_reward_error_that_names_it(reward):
    with pytest.raises(RewardError, match="train/7"):
        reward(make_rollout("4", answer=None))


def test_numeric_refuses_an_unknown_mode():
    with pytest.raises(ConfigError, match="'boxed'"):
        Numeric(Numeric.Config(number="first"))  # type: ignore[arg-type]
