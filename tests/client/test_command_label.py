"""The name that others see of a command."""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.client.command_label import command_label

LABELS = {
    "python train.py --lr 1e-4": "train.py",
    "python3.11 -u -X dev exp/train.py secret": "train.py",
    "/usr/bin/python -m my.module --key s3cret": "my.module",
    "python -c 'key = 5'": "python",
    "python - s3cret": "python",
    "python": "python",
    "./train.sh now": "train.sh",
    "nvidia-smi -L": "nvidia-smi",
    "env API_KEY=s3cret python train.py": "train.py",
    "env API_KEY=s3cret.py ./simulate": "env",
    "A=s3cret": "",
    "nice -n 10 ionice -c 3 python train.py": "train.py",
    "srun -n4 ./simulate s3cret": "srun",
    "bash -c 'curl -H token:s3cret x.sh'": "bash",
    "torchrun --nproc-per-node=4 -m my.train": "my.train",
    "accelerate launch --multi_gpu --num_processes 2 train.py --deepspeed ds.json": "train.py",
    "uv run --with torch --no-sync python -m my.module": "my.module",
    "docker run -e KEY=s3cret image": "docker",
    "python -m key=s3cret": "python",
    "python --script=train.py": "python",
    "python -- train.py": "train.py",
}


@pytest.mark.parametrize(("line", "label"), LABELS.items(), ids=LABELS)
def test_the_script_is_found_and_nothing_else_is_shown(line: str, label: str) -> None:
    assert command_label(shlex.split(line)) == label


WORDS = st.sampled_from(["-m", "-c", "--key", "-o", "--"]) | st.text("abcXYZ019=.-/_ ", min_size=1, max_size=8)


@given(st.lists(WORDS, max_size=8))
def test_only_the_program_a_script_or_a_module_is_shown(command: list[str]) -> None:
    label = command_label(["prog", *command])
    assert "=" not in label
    is_module = any(one == "-m" and PurePath(two).name == label for one, two in pairwise(command))
    assert label == "prog" or label.endswith((".py", ".sh")) or is_module


def test_odd_names_become_readable() -> None:
    assert command_label(["python", "tr\x1bain\u202e.py"]) == "tr ain .py"
    assert command_label(["\udcff.sh"]) == "?.sh"
