"""The plan command: what it writes and prints, and one line for everything that a user can get wrong."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_fcp import __version__
from megatron_fcp.cli import main
from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.plan.planfile import read_plan, write_plan
from megatron_fcp.testing.forwarding import reroute

pytestmark = pytest.mark.plan

LENGTHS = [10, 3, 0, 19]
PLAN = make_plan(LENGTHS, cp_size=4, tokens_per_rank=8, config=FcpConfig(block_size=4))
STREAM = ["--cp-size", "4", "--tokens-per-rank", "8", "--block-size", "4"]


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.txt"
    path.write_text("".join(f"{n}\n" for n in LENGTHS))
    return str(path)


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    out, err = capsys.readouterr()
    return status, out, err


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The single line on stderr of a command that must exit with status 2."""
    status, out, err = run(argv, capsys)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("megatron-fcp")
    assert "Traceback" not in err
    return err


def test_it_writes_the_plan_and_prints_its_figures(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json.gz"
    status, text, err = run(["plan", "--lengths", lengths, *STREAM, "--out", str(out)], capsys)
    assert (status, err) == (0, "")
    assert read_plan(out).digest == PLAN.digest
    rows = {line[:20].strip(): line[21:] for line in text.splitlines()}
    assert rows["stream"] == "3 documents, 32 tokens and 0.0% padding, causal mask"
    assert rows["blocks"] == "8 of 4 tokens on 4 ranks"
    assert rows["rounds"].startswith(f"{PLAN.schedule.num_rounds} (lower bound {PLAN.schedule.num_rounds})")
    assert rows["digest"] == PLAN.digest
    assert {"compute, max / mean", "KV between nodes", "a zig-zag ring", "memory, forward", "memory, backward"} <= set(
        rows
    )


@pytest.mark.parametrize("text", ["[10, 3, 0, 19]", " [10,\n3,0,19]\n", "10\n\n 3 \n0\r\n+19", "10\n3\n0\n19"])
def test_lengths_as_lines_or_json(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lengths"
    path.write_text(text)
    assert PLAN.digest in run(["plan", "--lengths", str(path), *STREAM], capsys)[1]
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert PLAN.digest in run(["plan", "--lengths", "-", *STREAM], capsys)[1]


def test_every_setting_reaches_the_planner(lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = FcpConfig(block_size=2, mask="full", ranks_per_node=2, rounds_per_stage=1, blocks_per_message=1)
    want = make_plan(LENGTHS, cp_size=4, tokens_per_rank=8, config=config)
    argv = ["plan", "--lengths", lengths, "--cp-size", "4", "--tokens-per-rank", "8", "--block-size", "2"]
    argv += ["--mask", "full", "--ranks-per-node", "2", "--rounds-per-stage", "1", "--blocks-per-message", "1"]
    argv += ["--num-kv-heads", "2", "--head-dim", "16", "--dtype-bytes", "4", "--json"]
    status, out, _ = run(argv, capsys)
    figures = json.loads(out)
    assert status == 0
    assert figures["digest"] == want.digest
    assert figures["kv_token_bytes"] == 2 * 2 * 16 * 4
    assert [t["name"] for t in figures["traffic"]] == ["inside nodes", "between nodes"]


def test_the_block_size_has_a_default(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(["plan", "--lengths", lengths, "--cp-size", "4", "--tokens-per-rank", "8"], capsys)[1]
    assert "4 of 8 tokens on 4 ranks" in out


def test_a_plan_file_is_reported_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = reroute(PLAN, np.random.default_rng(3))
    write_plan(plan, tmp_path / "a.json")
    status, out, _ = run(["plan", "--plan", str(tmp_path / "a.json"), "--out", str(tmp_path / "b.json")], capsys)
    assert status == 0
    assert plan.digest in out
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_one_rank_works_and_costs_nothing(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--lengths", lengths, "--cp-size", "1", "--tokens-per-rank", "32", "--json"]
    status, out, _ = run(argv, capsys)
    figures = json.loads(out)
    assert status == 0
    assert (figures["rounds"], figures["kv_tokens"], figures["forward_bytes"], figures["traffic"]) == (0, 0, 0, [])
    assert "FCP moves nothing" in run(argv[:-1], capsys)[1]


def test_a_picture(lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    status, _, err = run(["plan", "--lengths", lengths, *STREAM, "--picture", str(path)], capsys)
    assert (status, err) == (0, "")
    assert "<svg" in path.read_text()


def test_as_a_program(lengths: str) -> None:
    program = [sys.executable, "-m", "megatron_fcp.cli"]
    good = subprocess.run(
        [*program, "plan", "--lengths", lengths, *STREAM], capture_output=True, text=True, check=False
    )
    assert (good.returncode, good.stderr) == (0, "")
    assert PLAN.digest in good.stdout
    bad = subprocess.run(
        [*program, "plan", "--lengths", "nowhere", *STREAM], capture_output=True, text=True, check=False
    )
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "megatron-fcp plan: error: --lengths nowhere: cannot be read: No such file or directory\n"


def test_a_reader_that_stops_early_is_no_error(lengths: str) -> None:
    program = " ".join([sys.executable, "-m megatron_fcp.cli plan --lengths", lengths, *STREAM])
    done = subprocess.run(
        ["bash", "-c", f"{program} | true; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"], capsys) == (0, f"megatron-fcp {__version__}\n", "")
    status, out, _ = run(["--help"], capsys)
    assert status == 0
    assert "plan  " in out
    assert "--tokens-per-rank" in run(["plan", "--help"], capsys)[1]


def test_help_imports_no_command() -> None:
    program = (
        "import sys; from megatron_fcp.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numpy', 'torch', 'megatron', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10\n-3\n", "lengths.txt, line 2: -3 is negative"),
        ("10\n2.5\n", "line 2: 2.5 is not an integer"),
        ("ten\n", "line 1: ten is not an integer"),
        ("1 2\n", "line 1: 1 2 is not an integer"),
        ("1_0\n", "line 1: 1_0 is not an integer"),
        ("٣\n", "is not an integer"),
        ("9" * 5000, "is larger than any stream"),
        ("", "is empty; give one integer per line, or a JSON list"),
        ("\n\n", "is empty"),
        ("[1, -2]", "entry 1: -2 is negative"),
        ("[1, 2.0]", "entry 1: 2.0 is not an integer"),
        ("[1, true]", "entry 1: true is not an integer"),
        ('[1, "2"]', 'entry 1: "2" is not an integer'),
        ("[1, null]", "entry 1: null is not an integer"),
        ("[[1, 2]]", "entry 0: [1, 2] is not an integer"),
        ("[1, 2", "is not a whole JSON list"),
        ("[" * 100_000, "is not a whole JSON list"),
        ('{"lengths": [1]}', 'line 1: {"lengths": [1]} is not an integer'),
        ("20\n13\n", "the documents hold 33 tokens but the stream has only 32; raise"),
        ("33\n", "document 0 holds 33 tokens but the whole stream has only 32"),
    ],
)
def test_bad_lengths(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    err = refused(["plan", "--lengths", str(path), *STREAM, "--out", str(tmp_path / "plan.json")], capsys)
    assert f"error: --lengths {path}" in err
    assert message in err
    assert not (tmp_path / "plan.json").exists()


def test_lengths_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--lengths nowhere: cannot be read: No such file" in refused(
        ["plan", "--lengths", "nowhere", *STREAM], capsys
    )
    assert f"--lengths {tmp_path}: cannot be read" in refused(["plan", "--lengths", str(tmp_path), *STREAM], capsys)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "is not text" in refused(["plan", "--lengths", str(tmp_path / "binary"), *STREAM], capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ["--block-size", "5"],
            "--block-size 5 does not divide the 8 tokens per rank; the nearest sizes that do are 4 and 8",
        ),
        (["--block-size", "16"], "--block-size 16 does not divide the 8 tokens per rank"),
        (["--block-size", "0"], "argument --block-size: must be an integer from 1"),
        (["--cp-size", "0"], "argument --cp-size: must be an integer from 1 to 2147483648, got '0'"),
        (["--cp-size", "-2"], "argument --cp-size"),
        (["--cp-size", "four"], "argument --cp-size: must be an integer from 1 to 2147483648, got 'four'"),
        (["--cp-size", "9" * 30], "argument --cp-size"),
        (["--cp-size", "2000000"], "--block-size 4 cuts the stream of 16000000 tokens into 4000000 blocks"),
        (["--tokens-per-rank", "1e3"], "argument --tokens-per-rank: must be an integer from 1"),
        (["--mask", "sliding"], "argument --mask: invalid choice: 'sliding'"),
        (["--ranks-per-node", "0"], "argument --ranks-per-node: must be"),
        (["--rounds-per-stage", "0"], "argument --rounds-per-stage: must be"),
        (["--blocks-per-message", "0"], "argument --blocks-per-message: must be"),
        (["--num-kv-heads", "0"], "argument --num-kv-heads: must be"),
        (["--dtype-bytes", "two"], "argument --dtype-bytes: must be"),
        (["--blok-size", "4"], "unrecognized arguments: --blok-size 4"),
        (["--block", "4"], "unrecognized arguments: --block 4"),
        (["--out", "/nowhere/plan.json"], "--out /nowhere/plan.json: cannot be written: No such file or directory"),
        (["--out", "/"], "--out /: cannot be written: Is a directory"),
        (["--picture", "/nowhere/plan.png"], "--picture /nowhere/plan.png: cannot be written"),
        (["--picture", "plan.xyz"], "--picture plan.xyz: Format 'xyz' is not supported"),
        (
            ["--plan", "plan.json"],
            "--plan brings its own stream and settings; leave out --block-size, --cp-size, --lengths",
        ),
    ],
)
def test_bad_flags(change: list[str], message: str, lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    if change[0] == "--picture":
        pytest.importorskip("matplotlib")
    assert message in refused(["plan", "--lengths", lengths, *STREAM, *change], capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["plam"], "invalid choice: 'plam'"),
        (["plan"], "required: --lengths, --cp-size, --tokens-per-rank (or --plan)"),
        (["plan", "--cp-size", "4"], "required: --lengths, --tokens-per-rank (or --plan)"),
        (["plan", "--lengths"], "argument --lengths: expected one argument"),
    ],
)
def test_missing_arguments(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(argv, capsys)


def test_bad_plan_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    write_plan(PLAN, path)
    whole = path.read_text()
    for text, message in (
        (whole[: len(whole) // 2], "truncated or not JSON"),
        (whole.replace("fcp-plan/1", "fcp-plan/9"), "the format is 'fcp-plan/9', but this release reads 'fcp-plan/1'"),
        (whole.replace('"ranks_per_node":1', '"ranks_per_node":2'), "changed after it was written"),
        ("", "truncated or not JSON"),
    ):
        path.write_text(text)
        err = refused(["plan", "--plan", str(path)], capsys)
        assert f"--plan: plan file {path}: " in err
        assert message in err
        assert "write it again with `megatron-fcp plan --out`" in err
    assert "--plan nowhere: cannot be read: No such file" in refused(["plan", "--plan", "nowhere"], capsys)
