import pytest

from gpu_worker_pool.host.visible_devices import InstalledGpu, VisibleDevices, gpu_names_in, select_visible

BOX = (
    InstalledGpu(0, "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
    InstalledGpu(1, "GPU-8932aaaa-0000-4106-c12f-20bd9faed9f6"),
    InstalledGpu(2, "GPU-1f3c0b7e-1111-4106-c12f-20bd9faed9f6"),
    InstalledGpu(3, "MIG-5e2e4ab1-2222-4106-c12f-20bd9faed9f6"),
)
ALL = (0, 1, 2, 3)


def not_found(name: str) -> str:
    return f"GPU {name} in CUDA_VISIBLE_DEVICES not found on system"


def named_twice(index: int) -> str:
    return f"GPU {index} is named more than once in CUDA_VISIBLE_DEVICES"


def unreadable(name: str) -> str:
    return f"{name!r} in CUDA_VISIBLE_DEVICES is neither a GPU index nor a GPU UUID"


def all_shown(value: str) -> str:
    return f"CUDA_VISIBLE_DEVICES={value!r} names no GPU of this system, so all are shown"


@pytest.mark.parametrize(
    ("values", "indices"),
    [
        # Nothing is named: all are hidden.
        (["", " ", "\t\n", ",", " , ,, ", '""', "''", ' "" '], ()),
        # Commas and any white space separate names.
        (["0,1,2", "0 1 2", "0,1 2", "0, 1,  2", "0\n1,\t2\n", ",0,,1 2,", "\u00a00,1,2", "2,0,1"], (0, 1, 2)),
        (["1", " 1 ", "\t1,", "01", "0001"], (1,)),
        (["0,1,2,3"], ALL),
        # Quotes around the value or a name are ignored.
        (['"0,2"', "'0,2'", ' "0, 2" ', '"0","2"', "'0' '2'", "GPU-1f3c,0"], (0, 2)),
        # -1 and NoDevFiles hide what follows, without a warning.
        (["-1", " -1 ", "-1,0,1", "NoDevFiles", "nodevfiles,0", '"-1"'], ()),
        (["0,-1,2", "0 -1 junk 99", "0,NoDevFiles,2"], (0,)),
        # UUIDs in any case, and unambiguous beginnings of them.
        ([BOX[0].uuid, "GPU-8932f"], (0,)),
        (["gpu-8932AAAA-0000-4106-C12F-20BD9FAED9F6"], (1,)),
        (["GPU-1"], (2,)),
        ([BOX[3].uuid, "mig-5E"], (3,)),
    ],
)
def test_a_value_shows_these_gpus_and_no_others(values: list[str], indices: tuple[int, ...]) -> None:
    for value in values:
        for gpus in (BOX, BOX[::-1]):
            assert select_visible(value, gpus) == VisibleDevices(indices, is_filtering=True), value


AMBIGUOUS = "GPU GPU-8932 in CUDA_VISIBLE_DEVICES is ambiguous: it could be any of GPUs 0, 1"
UNREADABLE = (
    "1.5",
    "0x1",
    "+1",
    "\N{FULLWIDTH DIGIT ONE}",
    "1e0",
    "²",
    "one",
    "1;2",
    "1-2",
    "--1",
    "1'2",
    "GPU-",
    "GPU",
)


@pytest.mark.parametrize(
    ("value", "indices", "warnings"),
    [
        ("0,9,2,17", (0, 2), [not_found("9"), not_found("17")]),
        ("9,-1", (), [not_found("9")]),
        *((f"{name},0", (0,), [not_found(name)]) for name in ("-2", "-01", "-0", "GPU-dead", "GPU-d72c")),
        *((f"{name},2", (2,), [unreadable(name)]) for name in UNREADABLE),
        *((value, (1,), [named_twice(1)]) for value in ("1,1", "1,01", "1 GPU-8932aaaa", "1,1,1")),
        ("GPU-8932,2", (2,), [AMBIGUOUS]),
        *(("9" * digits + ",1", (1,), [not_found("9" * 60 + "…")]) for digits in (400, 5000, 100_000)),
    ],
)
def test_a_name_that_means_no_gpu_is_skipped_with_a_warning(
    value: str, indices: tuple[int, ...], warnings: list[str]
) -> None:
    assert select_visible(value, BOX) == VisibleDevices(indices, is_filtering=True, warnings=tuple(warnings))


@pytest.mark.parametrize("value", ["9", "9,10", "one two"])
def test_all_gpus_are_shown_with_a_warning_if_every_name_is_invalid(value: str) -> None:
    visible = select_visible(value, BOX)
    assert (visible.indices, visible.is_filtering, visible.warnings[-1]) == (ALL, False, all_shown(value))
    assert len(visible.warnings) == len(value.replace(",", " ").split()) + 1


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("what", ()),
        ("'0, 01' GPU-ab", ("0", "1", "GPU-ab")),
        ("2,-1,0", ("2",)),
    ],
)
def test_the_names_for_a_request(value: str, names: tuple[str, ...]) -> None:
    assert gpu_names_in(value) == names
