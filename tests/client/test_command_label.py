"""The name that others see of a command."""

from __future__ import annotations

import shlex
from pathlib import PurePath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_worker_pool.client.command_label import _WRAPPERS, command_label

LABELS = {
    "python train.py --lr 1e-4": "train.py",
    "python3.11 -u -X dev exp/train.py secret": "train.py",
    "/usr/bin/python -m my.module --key s3cret": "my.module",
    "python -um my.module": "my.module",
    "python -mmy.module": "my.module",
    "python -W ignore train.py": "train.py",
    "python -c 'key = 5'": "python",
    "python -Ic 'import x'": "python",
    "python - s3cret": "python",
    "env - A=1 python train.py": "train.py",
    "bash -s s3cret": "bash",
    "python": "python",
    "./train.sh now": "train.sh",
    "nvidia-smi -L": "nvidia-smi",
    "env API_KEY=s3cret python train.py": "train.py",
    "env -i -u HOME A=1 B=2 bash run.sh": "run.sh",
    "env -S 'python train.py'": "env",
    "env A=s3cret": "env",
    "A=s3cret": "",
    "nohup python train.py": "train.py",
    "time -p -o times.txt python train.py": "train.py",
    "nice -n 10 ionice -c 3 python train.py": "train.py",
    "stdbuf -oL python train.py": "train.py",
    "stdbuf -oL ./simulate s3cret": "simulate",
    "nice -10 ./simulate s3cret": "nice",
    "srun -n4 ./simulate s3cret": "simulate",
    "srun --unknown ./simulate s3cret": "srun",
    "srun --unknown python train.py": "train.py",
    "torchrun --unknown s3cret train.py": "train.py",
    "torchrun --unknown train s3cret": "torchrun",
    "stdbuf --output=L python train.py": "train.py",
    "timeout -k 5 2h python train.py": "train.py",
    "taskset -c 0-3 python train.py": "train.py",
    "bash -c 'curl -H token:s3cret x'": "bash",
    "bash -lc 'export KEY=1; run'": "bash",
    "bash -eu -o pipefail script.sh arg": "script.sh",
    "sh script": "script",
    "torchrun train.py": "train.py",
    "torchrun --nproc_per_node 4 --standalone train.py --lr 1": "train.py",
    "torchrun --nproc-per-node=4 -m my.train": "my.train",
    "torchrun --rdzv-endpoint host:1 exp/train.py": "train.py",
    "python -m torch.distributed.run --nproc_per_node 2 train.py": "train.py",
    "python -m torch.distributed.launch": "torch.distributed.launch",
    "accelerate launch --multi_gpu --num_processes 2 train.py": "train.py",
    "accelerate launch -m my.train": "my.train",
    "accelerate config --config_file s3cret": "accelerate",
    "deepspeed --num_gpus 4 train.py --deepspeed ds.json": "train.py",
    "deepspeed --module my.train": "my.train",
    "uv run train.py": "train.py",
    "uv run --with torch --no-sync python -m my.module": "my.module",
    "uv --directory x run -m my.module": "my.module",
    "uv pip install s3cret": "uv",
    "conda run -n ml --no-capture-output python train.py": "train.py",
    "poetry run torchrun --nproc_per_node 2 train.py": "train.py",
    "srun -n 4 --gres=gpu:1 --pty python train.py": "train.py",
    "mpirun -np 4 -x API_KEY python train.py": "train.py",
    "xvfb-run -a -s '-screen 0' python train.py": "train.py",
    "docker run -e KEY=s3cret image": "docker",
    "curl -u user:s3cret https://x": "curl",
    "python a=b.py": "python",
    "python -- train.py": "train.py",
}


@pytest.mark.parametrize(("line", "label"), LABELS.items(), ids=LABELS)
def test_the_script_is_found_and_nothing_else_is_shown(line: str, label: str) -> None:
    assert command_label(shlex.split(line)) == label


WRAPPERS = [
    "python",
    "python3",
    "bash",
    "env",
    "nohup",
    "time",
    "torchrun",
    "uv",
    "run",
    "accelerate",
    "launch",
    "conda",
]
OPTIONS = ["-n", "--num_processes", "--with", "-u", "-m", "-c", "--key", "-o", "--", "-x"]
WORDS = st.sampled_from([*WRAPPERS, *OPTIONS]) | st.text("abcXYZ019=.-/_", min_size=1, max_size=8)


@given(st.lists(WORDS, min_size=1, max_size=8))
@example(["python", "--", "--key"])
def test_no_word_with_an_equals_sign_and_no_option_is_shown(command: list[str]) -> None:
    label = command_label(command)
    assert "=" not in label
    assert label in {"", "-"} or not label.startswith("--")
    assert not label or any(
        label in {word.rpartition("/")[2], PurePath(word).name} or word.endswith(f"m{label}") for word in command
    )


LAUNCHERS = ["torchrun", "accelerate launch", "deepspeed", "uv run", "conda run", "srun", "env", "nice", "python"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_follows_an_unknown_option_is_not_taken_for_the_script(launcher: str) -> None:
    assert command_label([*launcher.split(), "--token", "s3cret", "train.py"]) == "train.py"
    assert command_label([*launcher.split(), "--token", "s3cret"]) == launcher.split(maxsplit=1)[0]
    assert command_label([*launcher.split(), "train.py", "--token", "s3cret", "other.py"]) == "train.py"


WITH_VALUES = [
    ([name, *sorted(wrapper.subcommands)], option)
    for name, wrapper in _WRAPPERS.items()
    for option in sorted(wrapper.values | {"--unknown", "-Y"})
]


@given(st.sampled_from(WITH_VALUES), st.lists(WORDS, max_size=4), st.lists(WORDS, max_size=4))
def test_the_value_of_an_option_is_never_shown(
    wrapped: tuple[list[str], str], before: list[str], after: list[str]
) -> None:
    words, option = wrapped
    flags = [word for word in before if word.startswith("--") and "=" in word]
    assert "s3cret" not in command_label([*words, *flags, option, "s3cret", *after])


def test_odd_names_become_readable() -> None:
    assert command_label(["python", "tr\x1bain\u202e.py"]) == "tr ain .py"
    assert command_label(["\udcff.sh"]) == "?.sh"
