"""The harness of the benchmarks: pairs, gate, interval, records. Its clock is a list; nothing is timed."""

import json

import pytest
import torch

from benchmarks import paired
from benchmarks.paired import Side, UnequalOutputsError, check_equal, compare


class Bench:
    """Two sides on one clock, which each run moves on by the next of its seconds; remembers the order."""

    def __init__(self, baseline, candidate, *, outputs=(1.0, 1.0)):
        self.now, self.order = 0.0, []
        self.sides = [
            self._side(name, list(seconds), output)
            for name, seconds, output in zip("AB", (baseline, candidate), outputs, strict=True)
        ]

    def _side(self, name, seconds, output):
        def prepare():
            self.now += 1000.0  # must not count

        def run():
            self.order.append(name)
            self.now += seconds.pop(0)
            return {"out": output() if callable(output) else output}

        return Side(name=name, run=run, prepare=prepare)

    def compare(self, **options):
        baseline, candidate = self.sides
        return compare("what", baseline=baseline, candidate=candidate, clock=lambda: self.now, **options)


def test_sides_alternate_and_warm_ups_and_preparation_do_not_count():
    bench = Bench([99, 2, 4, 6, 8, 10, 12, 14], [77, 1, 2, 3, 4, 5, 6, 1])
    result = bench.compare()
    assert "".join(bench.order) == "AB" + "ABBA" * 3 + "AB"
    assert result.ratios == (2, 2, 2, 2, 2, 2, 14)
    assert result.median == 2
    assert (result.baseline_median, result.candidate_median) == (8, 3)
    assert result.interval[0] == 2
    assert result.interval[1] in (2, 14)


def test_fewer_than_seven_pairs_or_no_warm_up_are_refused():
    with pytest.raises(ValueError, match=r"at least 7.*got 6 and 1"):
        Bench([], []).compare(pairs=6)
    with pytest.raises(ValueError, match="got 7 and 0"):
        Bench([], []).compare(warmups=0)


def test_outputs_that_differ_at_the_start_give_no_ratio():
    bench = Bench([1], [1], outputs=(1.0, 1.1))
    with pytest.raises(UnequalOutputsError, match=r"out: differs by 1\.000e-01"):
        bench.compare()
    assert bench.order == ["A", "B"]


def test_outputs_that_come_to_differ_in_a_later_pair_give_no_ratio():
    values = iter([1.0, 1.0, 1.0, 2.0])
    bench = Bench([1] * 8, [1] * 8, outputs=(1.0, lambda: next(values)))
    with pytest.raises(UnequalOutputsError):
        bench.compare()
    assert len(bench.order) == 8


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        ({"x": torch.ones(4)}, {"x": torch.ones(4) * (1 + 2e-5)}),
        ({"x": torch.ones(4)}, {"x": torch.ones(2, 2)}),
        ({"x": torch.ones(2)}, {"x": torch.tensor([1.0, float("nan")])}),
        ({"x": 1.0}, {"y": 1.0}),
        ({"tokens": 3}, {"tokens": 4}),
        ({"text": "a"}, {"text": "b"}),
        ({}, {}),
    ],
)
def test_the_gate_refuses(expected, got):
    with pytest.raises(UnequalOutputsError):
        check_equal(expected, got)


def test_the_gate_lets_rounding_pass():
    check_equal(
        {"x": torch.ones(4), "loss": 1.0, "tokens": 3, "zero": torch.zeros(3)},
        {"x": torch.ones(4) * (1 + 5e-6), "loss": 1.0 + 5e-6, "tokens": 3, "zero": torch.full((3,), 1e-9)},
    )


def test_the_interval_holds_the_median_and_widens_with_the_spread():
    narrow = paired.bootstrap_interval([1.9, 2.0, 2.0, 2.0, 2.0, 2.0, 2.1])
    wide = paired.bootstrap_interval([1.0, 1.4, 1.8, 2.0, 2.2, 2.6, 3.0])
    assert narrow[0] <= 2.0 <= narrow[1]
    assert wide[0] < 2.0 < wide[1]
    assert wide[1] - wide[0] > narrow[1] - narrow[0]


def test_the_peak_counts_what_lives_at_the_same_time():
    mebi = 2**20

    def one_after_the_other():
        for _ in range(3):
            torch.empty(mebi, dtype=torch.uint8).fill_(1)

    def together():
        return [torch.empty(mebi, dtype=torch.uint8).fill_(1) for _ in range(3)]

    assert mebi <= paired.peak_bytes(one_after_the_other) < 1.1 * mebi
    assert 3 * mebi <= paired.peak_bytes(together) < 3.1 * mebi


def test_the_peak_sees_the_backward_pass():
    weight = torch.ones(512, 512, requires_grad=True)
    forward = paired.peak_bytes(lambda: weight.detach().exp().sum())
    both = paired.peak_bytes(lambda: torch.autograd.grad(weight.exp().sum(), weight))  # keeps exp(weight)
    assert both > 1.9 * forward


def test_results_are_written_as_json_and_markdown(tmp_path, capsys):
    met = Bench([2.0] * 8, [1.0] * 8).compare(target=1.5, facts={"tokens": 64})
    missed = paired.summarise(
        "memory",
        baseline=("A", [4 * 2**20] * 7),
        candidate=("B", [2**21] * 7),
        quantity="peak bytes",
        target=4,
    )
    paired.report("name", [met, missed], folder=tmp_path / "new")
    stored = json.loads((tmp_path / "new" / "name.json").read_text())
    first, second = stored["comparisons"]
    assert first["ratios"] == [2.0] * 7
    assert first["facts"] == {"tokens": 64}
    assert second["median"] == 2.0
    where = stored["circumstances"]
    assert where["versions"]["torch"] == torch.__version__
    assert where["threads"] == torch.get_num_threads()
    assert where["cores"] >= 1
    assert len(where["date"].split("-")) == 3
    text = (tmp_path / "new" / "name.md").read_text()
    assert "| what (tokens 64) | A: 2 s | B: 1 s | 2 (7 pairs) | 2 to 2 | 1.5, met |" in text
    assert "| memory | A: 4.0 MiB | B: 2.0 MiB | 2 (7 pairs) | 2 to 2 | 4, missed |" in text
    assert capsys.readouterr().out == text + "\n"
