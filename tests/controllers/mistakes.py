"""User mistakes: command lines of `bad_input.py`, and the texts that each message must contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Wrong:
    words: tuple[str, ...]
    says: tuple[str, ...]
    """Texts in the message: the place, the value, the allowed values, the nearest correct name."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Files to write before the run."""

    def write_files(self, folder: Path) -> None:
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


def _in_script(name: str, *says: str) -> Wrong:
    return Wrong(("--mistake", name), says)


def _in_file(name: str, content: str | bytes, *says: str, words: tuple[str, ...] = ()) -> Wrong:
    data = content.encode() if isinstance(content, str) else content
    return Wrong(("--config", name, *words), says, {name: data})


IN_THE_SCRIPT = {
    "setting": "error: ToyConfig has no setting 'fail_onn' (value 3); did you mean 'fail_on'?",
    "column": "error: node 'reward.score' reads column 'answer', which no node writes; did you mean 'answr'?",
    "signature": "error: RewardConfig.function: Reward: reward function unnamed(sentence: str) -> float takes neither 'response' nor "
    "'response_ids'",
    "tokenizer": "/nowhere': no such folder",
    "cpus": "error: the placement asks for 5000 CPUs (big: 5000), but this machine has ",
    "argument": "error: Driver takes no argument 'nme' (value 'first'); did you mean 'name'?",
    "address": "error: RAY_ADDRESS='http://ray-head:8265' is the address of a dashboard or a job server",
    "schedule steps": "error: Synchronous.steps: input should be greater than or equal to 1, not 0",
    "staleness": "error: Asynchronous.max_staleness: input should be greater than or equal to ",
    "partial": "did you mean 'continue'?",
    "ranks": "error: a group on pool 'pool' needs at least one rank, not 0",
    "buffer": "error: BufferConfig has no setting 'max_row' (value 10); did you mean 'max_rows'?",
    "checkpoint": "error: CheckpointConfig has no setting 'evry' (value 3); did you mean 'every'?",
    "keep": "error: CheckpointConfig.keep: input should be greater than or equal to 1, not 0",
    "temperature": "error: Sampling.temperature: input should be greater than or equal to 0, not -1",
    "method": "'gpro'; did you mean 'grpo'?",
    "rewards": "give rewards=..., a function of `response`",
    "node": "did you mean 'generate'?",
    "config": "error: ActorConfig has no setting 'learnin_rate' (value 0.001); did you mean 'learning_rate'?",
    "lora": "error: Lora.rank: input should be greater than or equal to 1, not 0",
    "name": "error: name='runs/first' cannot name a folder",
    "resume": "did you mean 'latest'?",
    "progress": "error: progress='plian'; did you mean 'plain'?",
    "stop_on": "did you mean 'no_signal'?",
    "schedule": "error: Driver(schedule=...) takes a value such as weft.Synchronous(steps=100), not <class",
    "max_rows": "BufferConfig(max_rows=1) holds fewer",
    "place": "did you mean 'actor'?",
}

MISTAKES: Mapping[str, Wrong] = {
    **{name: _in_script(name, says) for name, says in IN_THE_SCRIPT.items()},
    "flag's name": Wrong(
        ("--learning-rat", "1"), ("--learning-rat 1: there is no", "did you mean '--learning-rate'?")
    ),
    "nested flag's name": Wrong(
        ("--rates.paek", "1"), ("--rates.paek 1: there is no", "did you mean '--rates.peak'?")
    ),
    "flag's type": Wrong(("--learning-rate", "fast"), ("--learning-rate fast: ", "a valid number")),
    "flag's whole number": Wrong(("--steps", "1.5"), ("--steps 1.5: ", "a valid integer")),
    "flag's choice": Wrong(
        ("--mode", "fsat"), ("--mode fsat: ", "'fast' or 'slow'", "did you mean 'fast'?")
    ),
    "flag below its range": Wrong(("--steps=0",), ("--steps 0: ", "greater than or equal to 1")),
    "flag above its range": Wrong(("--steps", "2000"), ("--steps 2000: ", "less than or equal to 1000")),
    "nested flag's range": Wrong(("--rates.peak", "0"), ("--rates.peak 0: ", "greater than 0")),
    "two flags": Wrong(("--steps", "0", "--mode", "fsat"), ("--steps 0: ", "--mode fsat: ")),
    "flag without value": Wrong(("--steps",), ("--steps",)),
    "word too many": Wrong(("fast",), ("fast",)),
    "no file": Wrong(
        ("--config", "setings.yaml"),
        ("setings.yaml: there is no such file", "did you mean 'settings.yaml'?"),
        {"settings.yaml": b""},
    ),
    "file's ending": _in_file("settings.json", "{}", "--config settings.json: ", ".yaml, .yml, .toml"),
    "two files": _in_file("one.yaml", "", "--config is given 2 times", words=("--config", "two.yaml")),
    "no file's name": Wrong(("--config",), ("--config needs a file",)),
    "file's name": _in_file(
        "a.yaml",
        "steps: 3\nlearning_rat: 1\n",
        "a.yaml:2: there is no setting 'learning_rat' (value 1)",
        "did you mean 'learning_rate'?",
    ),
    "file's hyphen": _in_file(
        "b.yaml", "learning-rate: 1\n", "b.yaml:1: ", "did you mean 'learning_rate'?"
    ),
    "file's nested name": _in_file(
        "c.yaml",
        "rates:\n  peak: 1\n  dcay: linear\n",
        "c.yaml:3: there is no setting 'rates.dcay'",
        "did you mean 'decay'?",
    ),
    "file's type": _in_file(
        "d.yaml", "steps: many\n", "d.yaml:1: steps: ", "a valid integer", "not 'many'"
    ),
    "file's choice": _in_file(
        "e.yaml", "rates: {decay: linaer}\n", "e.yaml:1: rates.decay: ", "did you mean 'linear'?"
    ),
    "file's range": _in_file(
        "f.toml", "[rates]\npeak = -1\n", "f.toml:2: rates.peak: ", "greater than 0, not -1"
    ),
    "file's list": _in_file(
        "g.toml", "small = true\nsizes = 3\n", "g.toml:2: sizes: ", "a valid tuple, not 3"
    ),
    "file's name twice": _in_file(
        "h.yaml",
        "steps: 1\nsmall: true\nsteps: 2\n",
        "h.yaml:3: steps is given twice, the first time in h.yaml:1",
    ),
    "file's table": _in_file(
        "i.toml",
        "mode = 'fast'\n[rate]\npeak = 1\n",
        "i.toml:2: there is no setting 'rate'",
        "did you mean 'rates'?",
    ),
    "file's group": _in_file("j.yaml", "rates: 3\n", "j.yaml:1: rates: ", "not 3"),
    "no mapping": _in_file(
        "k.yaml", "- steps\n- 3\n", "k.yaml:1: a file of settings has `name: value` in each line"
    ),
    "no YAML": _in_file("l.yaml", "steps: 3\nmode: [fast\n", "l.yaml:3: it is not YAML"),
    "tab in YAML": _in_file("m.yaml", "rates:\n\tpeak: 1\n", "m.yaml:2: it is not YAML"),
    "object in YAML": _in_file(
        "n.yaml", "root: !!python/object/apply:os.getcwd []\n", "n.yaml:1: it is not YAML"
    ),
    "no TOML": _in_file("o.toml", "steps = 3\nmode = fast\n", "o.toml:2: it is not TOML"),
    "no text": _in_file("p.yaml", b"\xff\xfe\x00", "--config p.yaml: it cannot be read"),
    "flag over file": _in_file("q.yaml", "steps: 3\n", "--steps 0: ", words=("--steps", "0")),
}
