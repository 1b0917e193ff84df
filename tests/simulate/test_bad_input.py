"""Every command and what it is given wrongly: one line with flag, value and remedy, status 2, and nothing written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_fcp.cli import main
from megatron_fcp.commands.output import print_json
from megatron_fcp.config import FcpConfig
from megatron_fcp.files import check_place, write_whole
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.plan.planfile import write_plan
from megatron_fcp.simulate import load_hardware
from megatron_fcp.simulate.trace import RECORDING_FORMAT

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytestmark = pytest.mark.plan

SIZES = ["--cp-size", "8", "--tokens-per-rank", "1024"]
WRITES = {"view": ["--output", "out"], "trace": ["--output", "out"]}
INSTRUMENTS = ("simulate", "view", "trace", "tune")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan([3000, 100, 900], cp_size=4, tokens_per_rank=1024, config=FcpConfig(block_size=256))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *argv: str, lines: int = 1) -> str:
    """The last line on stderr, of ``lines``, of a command that must fail and leave the folder as it was."""
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    try:
        status = main(list(argv))
    except SystemExit as exit_:
        status = exit_.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), err
    assert lines == 0 or len(err.strip().splitlines()) == lines, err
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert f"megatron-fcp {argv[0]}: error: " in err
    return err.strip().splitlines()[-1]


HARDWARE = {
    "latency_s: 1.0e-05": {
        "": "lacks latency_s; `megatron-fcp profile` writes such a file",
        "latency_s: .nan": "latency_s must be positive, got nan",
        "latency_s: -.inf": "latency_s must be positive, got -inf",
        "latency_s: 1e999": "latency_s must be positive, got inf",
        "latency_s: true": "latency_s must be a number, got True",
        "latency_s: fast": "latency_s must be a number, got 'fast'",
        "latency_s: 1.0e-05\ncolour: 3": "has the unknown entry colour",
        "latency_s: [": "not YAML",
    },
    "ranks_per_node: 8": {
        "ranks_per_node: 8.5": "ranks_per_node must be a number, got 8.5",
        "ranks_per_node: " + "9" * 400: "ranks_per_node must be positive, got 999",
    },
    "comm_sms: 0": {"comm_sms: 132": "comm_sms 132 leaves nothing of 132 SMs"},
    "name: h100-ib": {"name: [1]": "the name must be text"},
    "speeds: []": {
        "speeds: [1.0, .nan]": "the speed of rank 1 must be positive, got nan",
        "speeds: 3": "speeds must be a list of one number per rank",
    },
}


@pytest.mark.parametrize(
    ("line", "change"), [(line, change) for line, changes in HARDWARE.items() for change in changes]
)
def test_hardware_files(capsys: pytest.CaptureFixture[str], folder: Path, line: str, change: str) -> None:
    path = folder / "hw.yaml"
    load_hardware("h100-ib").to_yaml(path)
    text = path.read_text()
    assert line in text
    path.write_text(text.replace(line, change))
    (folder / "lengths").write_text("100\n")
    for argv in (
        ["simulate", *SIZES], ["tune", *SIZES], ["compare", "--scales", "4"],
        ["plan", "--lengths", "lengths", *SIZES],
    ):  # fmt: skip
        error = refused(capsys, folder, *argv, "--hardware", "hw.yaml")
        assert f"--hardware {'hw.yaml'}" in error
        assert HARDWARE[line][change] in error


@pytest.mark.parametrize("command", INSTRUMENTS)
def test_files_that_hold_something_else(
    capsys: pytest.CaptureFixture[str], folder: Path, plan: Plan, command: str
) -> None:
    out = WRITES.get(command, [])
    write_plan(plan, "p.json")
    write_plan(plan, "p.json.gz")
    whole, packed = Path("p.json").read_text(), Path("p.json.gz").read_bytes()
    Path("cut.json.gz").write_bytes(packed[:-40])
    Path("cut.json").write_text(whole[:-40])
    Path("plain.json.gz").write_text(whole)
    Path("other.json").write_text(whole.replace("fcp-plan/1", "fcp-plan/9"))
    Path("empty").write_text("")
    Path("none").write_text("[]")
    Path("binary").write_bytes(b"\xff\xfe\x00\x80")
    Path("long").write_text("999999\n")
    Path("nan").write_text("nan\n" * 8)
    Path("words").write_text("fast\n")
    Path("few").write_text("1.0\n")
    Path("nested").write_text("[[1, 2], [3]]")
    Path("hw.yaml").write_bytes(b"\xff\xfe\x80")
    for flag, values in {
        "--plan": {
            "cut.json.gz": "truncated or no gzip file", "cut.json": "truncated or not JSON",
            "plain.json.gz": "truncated or no gzip file", "other.json": "the format is 'fcp-plan/9'",
            "empty": "truncated or not JSON", "binary": "not JSON text", "nowhere": "cannot be read: No such file",
            ".": "cannot be read: Is a directory",
        },
        "--lengths": {
            "empty": "is empty", "none": "is empty", "binary": "is not text", "nowhere": "cannot be read",
            "long": "hold 999999 tokens but the ranks have room for 8192, 991807 too few; raise --cp-size",
        },
        "--speeds": {
            "empty": "it is empty", "binary": "expected one number per line", "words": "expected one number per line",
            "few": "1 rank speeds were given for 8 ranks; give one per rank", "nan": "speed of rank 0 must be positive",
            "nested": "expected one number per line", "nowhere": "no such file",
        },
        "--hardware": {"hw.yaml": "not YAML", ".": "is neither a file nor one of", "h900": "is neither a file"},
    }.items():  # fmt: skip
        sizes = [] if flag == "--plan" else SIZES
        for value, message in values.items():
            error = refused(capsys, folder, command, *sizes, *out, flag, value)
            assert flag in error, error
            assert message in error


@pytest.mark.parametrize("command", INSTRUMENTS)
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--cp-size", "2147483648"], "--cp-size 2147483648 times --tokens-per-rank 32768 is a stream of"),
        (["--cp-size", "2147483649"], "argument --cp-size: must be an integer from 1"),
        (["--cp-size", "0"], "argument --cp-size: must be an integer from 1"),
        (["--tokens-per-rank", "nan"], "argument --tokens-per-rank: must be an integer from 1"),
        (["--seed", "-1"], "argument --seed: must be an integer from 0"),
        (["--window", "-1"], "argument --window: must be an integer from 0"),
        (["--workload", "tall"], "argument --workload: invalid choice: 'tall'"),
        (["--model", "gpt-9"], "argument --model: invalid choice: 'gpt-9'"),
        (["--model", "llama3-8b", "--tensor", "3"], "--tensor 3 does not divide the 32 heads"),
        (["--plan", "p.json", "--cp-size", "8"], "--plan brings its own stream; leave out --cp-size"),
        (["--plan", "p.json", "--window", "5"], "the plan of --plan p.json is for whole documents; leave out --window"),
        (["--output", "nowhere/out"], "--output nowhere/out: cannot be written: No such file or directory"),
        (["--output", "."], "--output .: cannot be written: Is a directory"),
        (["--output", "file/out"], "--output file/out: cannot be written: Not a directory"),
    ],
)
def test_numbers_and_places(
    capsys: pytest.CaptureFixture[str], folder: Path, plan: Plan, command: str, extra: list[str], message: str
) -> None:
    write_plan(plan, "p.json")
    Path("file").write_text("")
    out = [] if "--output" in extra else WRITES.get(command, [])
    if command == "simulate" and "--output" in extra:
        message = "unrecognized arguments: --output"
    assert message in refused(capsys, folder, command, *out, *extra)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tune", *SIZES, "--picture", "x.xyz"], "--picture x.xyz: Format 'xyz' is not supported"),
        (["compare", "--picture", "nowhere/x.png"], "--picture nowhere/x.png: cannot be written"),
        (["compare", "--scales", "4", "100000000"], "--scales 100000000 times --tokens-per-rank 32768 is a stream of"),
        (["profile", "--output", "nowhere/x.yaml"], "--output nowhere/x.yaml: cannot be written"),
        (["profile", "--num-heads", "3"], "--num-heads 3 is not a multiple of --num-kv-heads 2; use --num-kv-heads 1"),
        (["replay", "--plan", "nowhere"], "--plan nowhere: cannot be read: No such file"),
        (
            ["replay", "--plan", "p.json", "--save-hardware", "nowhere/x"],
            "--save-hardware nowhere/x: cannot be written",
        ),
        (["replay", "--plan", "p.json", "--peak-tflops", "nan"], "--peak-tflops must be a positive number, got nan"),
        (["profile", "--device", "warp"], "--device warp: this machine has no GPU"),
        (["compare", "--hardware", "two.yaml", "--scales", "2", "4"], "2 rank speeds were given for 4 ranks; give one"),
        (["simulate", *SIZES, "--window-attn-skip-freq", "2"], "pass both"),
        (
            ["simulate", "--model", "llama3-8b", "--window", "9", "--window-attn-skip-freq", "[1]*3"],
            "[1, 1, 1] must be one 0 or 1 for each of the 32 layers",
        ),
        (["tune", "--window-attn-skip-freq", "2**9"], "must be an integer of at least 1 or a list of 0 and 1"),
        (["simulate", *SIZES, "--model", "llama3-405b"], "GB more than the 80.0 GB of h100-ib"),
    ],
)
def test_other_flags(
    capsys: pytest.CaptureFixture[str], folder: Path, plan: Plan, argv: list[str], message: str
) -> None:
    write_plan(plan, "p.json")
    dataclasses.replace(load_hardware("flat5920"), speeds=(1.0, 0.5)).to_yaml("two.yaml")
    if argv[:2] == ["profile", "--device"] and torch_sees_a_gpu():
        pytest.skip("there is a GPU here")
    assert message in refused(capsys, folder, *argv)


def torch_sees_a_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def test_tokens_that_only_one_block_divides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--cp-size", "4", "--tokens-per-rank", "4099", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["block_size"] == 4099


EVENT = {"rank": 0, "kind": "pull", "index": 0, "start_s": 0.0, "end_s": 1.0}


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (5, "event 0 lacks everything"),
        ({**EVENT, "kind": ["pull"]}, "event 0 lacks a known kind"),
        ({**EVENT, "rank": "0"}, "event 0 lacks a whole number as rank and index"),
        ({**EVENT, "end_s": float("nan")}, "event 0 lacks an end after its start"),
        ({**EVENT, "start_s": 2.0}, "event 0 lacks an end after its start"),
    ],
)
def test_recordings(capsys: pytest.CaptureFixture[str], folder: Path, plan: Plan, event: object, message: str) -> None:
    write_plan(plan, "p.json")
    text = json.dumps({"format": RECORDING_FORMAT, "digest": plan.digest, "events": [event]})
    argv = ["trace", "--plan", "p.json", "--output", "out", "--recording", "r.json"]
    Path("r.json").write_text(text)
    assert f"--recording r.json: {message}" in refused(capsys, folder, *argv)
    Path("r.json").write_text(text[:-9])
    assert "--recording r.json: truncated or not JSON" in refused(capsys, folder, *argv)


def test_a_full_disk_leaves_what_was_there(capsys: pytest.CaptureFixture[str], folder: Path, plan: Plan) -> None:
    """Each writer says which flag failed; lines before the error are its progress."""
    write_plan(plan, "p.json")
    for argv in (
        ["view", "--plan", "p.json", "--output"],
        ["trace", "--plan", "p.json", "--output"],
        ["plan", "--plan", "p.json", "--out"],
        ["plan", "--plan", "p.json", "--picture"],
        ["tune", *SIZES, "--layout", "resident", "--output"],
    ):
        error = refused(capsys, folder, *argv, "/dev/full", lines=0)
        assert f"{argv[-1]} /dev/full: cannot be written: No space left on device" in error


def test_files_are_whole_or_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole("a", "old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole("a", "new" * 1000)
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert Path("a").read_text() == "old"
    monkeypatch.undo()
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(PermissionError):
        check_place(folder / "b")


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "--plan", "p.json"],
        ["simulate", "--plan", "p.json"],
        ["view", "--plan", "p.json", "--output", "v.html"],
        ["trace", "--plan", "p.json", "--output", "t.json"],
        ["tune", *SIZES, "--layout", "resident"],
        ["compare", "--scales", "4", "--workloads", "longtail", "--tokens-per-rank", "1024", "--systems", "fcp"],
    ],
)
def test_json_is_alone_on_stdout(capsys: pytest.CaptureFixture[str], plan: Plan, argv: list[str]) -> None:
    write_plan(plan, "p.json")
    assert main([*argv, "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


def test_json_has_no_word_for_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), 1.5, (float("inf"), None, True, "x")], 2: FcpConfig.head_groups})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5, [None, None, True, "x"]], "2": 4}
