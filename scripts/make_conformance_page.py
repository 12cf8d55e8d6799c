"""Write docs/conformance.md: what a fixture is, and every row of the peers' fixture with its counterpart.

The text is in conformance_page.md beside this file. The table comes from tests/numerics/peer_rows.py, which
the tests run, and the fields and hyperparameters from titan_rl/tools/conformance/.

    python scripts/make_conformance_page.py [--check]
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.numerics import peer_rows  # noqa: E402
from tests.numerics.conformance_rows import place  # noqa: E402
from tests.numerics.peer_rows import ROWS, LeftOut, LossRow  # noqa: E402
from titan_rl.tools.conformance import fixture  # noqa: E402
from titan_rl.tools.conformance.options import FUNCTIONS  # noqa: E402

TARGET = ROOT / "docs" / "conformance.md"
TEMPLATE = ROOT / "scripts" / "conformance_page.md"
DATA = json.loads((ROOT / "tests" / "numerics" / "data" / "fixture_a.json").read_text())
TITLES = {
    "verl_0.9.1": "verl 0.9.1",
    "trl_1.16.0": "TRL 1.16.0",
    "others/openrlhf": "OpenRLHF 0.11.2",
    "others/slime": "slime",
    "others/titanrl": "TorchTitan's experiment",
    "others/forge_sig": "torchforge",
    "prime_rl": "prime-rl",
}


def main() -> int:
    """Write the page, or with ``--check`` only say whether it is out of date."""
    text = render()
    if "--check" in sys.argv:
        is_current = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text
        print(f"{TARGET} is {'current' if is_current else 'out of date'}")
        return not is_current
    TARGET.write_text(text, encoding="utf-8")
    return 0


def render() -> str:
    """The page."""
    left_out = sum(isinstance(row, LeftOut) for row in ROWS.values())
    made = {
        "fields": "\n".join(_field(name) for name in fixture.MEANINGS),
        "tables": "\n".join(_table(name) for name in FUNCTIONS),
        "total": str(len(ROWS)),
        "compared": str(len(ROWS) - left_out),
        "left_out": str(left_out),
        "peers": "".join(_peer(prefix, title) for prefix, title in TITLES.items()),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, value in made.items():
        text = text.replace(f"{{{name}}}", value)
    return text.rstrip() + "\n"


def _field(name: str) -> str:
    shape = (
        "[B]" if name in (*fixture.ROLLOUTS, "uid") else "[B, T, V]" if name in fixture.WORDS else "[B, T]"
    )
    meaning = fixture.MEANINGS[name] + ("; required" if name in fixture.REQUIRED else "")
    return f"| `{name}` | `{shape}` | {meaning} |"


def _table(name: str) -> str:
    config_type, rows = FUNCTIONS[name]
    default = config_type()
    keys = ", ".join(
        f"`{key} = {json.dumps(getattr(default, key))}`" for key in config_type.__dataclass_fields__
    )
    if "max_tokens" in config_type.__dataclass_fields__:
        keys = keys.replace("`max_tokens = 1`", "`max_tokens` (T)")
    return f"| `{name}` | {keys} | {', '.join(f'`{row}`' for row in rows) or _OTHER_ROWS[name]} |"


_OTHER_ROWS = {
    "sample_mean_over_constant": "all that divide by it, algorithms too",
    "soft_overlong": "`advantage/group_normalized\\|centred\\|soft_overlong`",
    "whiten": "`advantage/...\\|whitened`",
    "length_adaptive_lambda": "`advantage/gae\\|length_adaptive`",
    "clipped_value_loss": "`value_loss/clipped`",
    "kto_loss": "`preference/kto`",
}


def _peer(prefix: str, title: str) -> str:
    names = [name for name in ROWS if name == prefix or name.startswith(f"{prefix}/")]
    lines = [_row(name, name.removeprefix(f"{prefix}/")) for name in names]
    head = (
        "| their row | what is compared | counterpart | row of the command | differences, and what was set |"
    )
    return "\n".join(["", f"### {title}", "", head, "|---|---|---|---|---|", *lines, ""])


def _row(name: str, shown: str) -> str:
    row = ROWS[name]
    if isinstance(row, LeftOut):
        return f"| `{_cell(shown)}` | nothing | left out | | {_cell(row.reason)} |"
    where = place(name)
    fields = [_set(key, value) for key, value in where.fields.items()]
    notes = [note for note in (row.note, *fields, where.note) if note]
    parts = str(row).split(" / ") if isinstance(row, LossRow) else [str(row)]
    counterpart = (
        " x ".join(f"`{_cell(one)}`" for one in parts)
        .replace(" x `+ ", " + `")
        .replace("`old policy: ", "old policy `")
    )
    cells = [
        f"`{_cell(shown)}`",
        _compared(name),
        counterpart,
        f"`{_cell(where.row)}`",
        _cell("; ".join(notes)),
    ]
    return f"| {' | '.join(cells)} |"


def _compared(name: str) -> str:
    row, peer = ROWS[name], peer_rows.find(DATA, name)
    if isinstance(row, LossRow):
        found = ["loss", "gradient norm" if "grad_l2" in peer else ""]
        return ", ".join([one for one in found if one] + ["gradient of row 0"] * ("grad_row0" in peer))
    kinds = {
        "group": "advantages",
        "whitened group": "advantages",
        "whitened returns": "advantages, returns",
        "whitened gae": "advantages, returns",
        "gae row 0": "advantages, returns, of row 0",
        "value loss": "loss, clip fraction",
        "kl": "values per token",
        "kl sum": "sum of values",
        "correction": "weights per token",
        "preference": "loss",
    }
    return kinds[row.kind]


def _set(key: str, value: object) -> str:
    if value == key:
        return f"`{key}` from the peer's row"
    return f"`{key}` = `{value}`" if isinstance(value, str) else f"`{key}` = `{json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
