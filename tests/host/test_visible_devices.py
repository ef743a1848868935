import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_a_variable_that_is_not_set_shows_all_gpus() -> None:
    assert select_visible(None, BOX) == VisibleDevices(ALL, is_filtering=False)


@pytest.mark.parametrize("value", ["", " ", "\t\n", ",", " , ,, ", '""', "''", ' "" '])
def test_a_value_without_any_name_hides_all_gpus(value: str) -> None:
    assert select_visible(value, BOX) == VisibleDevices((), is_filtering=True)


@pytest.mark.parametrize(
    "value", ["0,1,2", "0 1 2", "0,1 2", "0, 1,  2", "0\t1\t2", "0\n1,\t2\n", ",0,,1 2,", "\u00a00,1,2"]
)
def test_commas_and_any_white_space_separate_names(value: str) -> None:
    assert select_visible(value, BOX) == VisibleDevices((0, 1, 2), is_filtering=True)


@pytest.mark.parametrize("value", ["1", " 1 ", "\t1,"])
def test_one_index_shows_one_gpu(value: str) -> None:
    assert select_visible(value, BOX) == VisibleDevices((1,), is_filtering=True)


def test_naming_every_gpu_is_filtering_too() -> None:
    assert select_visible("0,1,2,3", BOX) == VisibleDevices(ALL, is_filtering=True)


def test_gpus_are_shown_in_system_order_whatever_order_they_are_named_or_installed_in() -> None:
    assert select_visible("3,0,2", BOX[::-1]).indices == (0, 2, 3)
    assert select_visible(None, BOX[::-1]).indices == ALL


def test_system_indices_are_kept_where_they_have_gaps() -> None:
    gappy = (InstalledGpu(7, "GPU-a"), InstalledGpu(12, "GPU-b"))

    assert select_visible("12", gappy) == VisibleDevices((12,), is_filtering=True)
    assert select_visible(None, gappy).indices == (7, 12)


def test_an_index_that_is_not_there_is_skipped_with_a_warning() -> None:
    assert select_visible("0,9,2,17", BOX) == VisibleDevices(
        (0, 2), is_filtering=True, warnings=(not_found("9"), not_found("17"))
    )


def test_the_warning_for_a_missing_index_reads_as_documented() -> None:
    assert select_visible("0,9", BOX).warnings == ("GPU 9 in CUDA_VISIBLE_DEVICES not found on system",)


@pytest.mark.parametrize(
    "name",
    [
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
    ],
)
def test_what_is_neither_an_index_nor_a_uuid_is_skipped_with_a_warning(name: str) -> None:
    assert select_visible(f"{name},2", BOX) == VisibleDevices((2,), is_filtering=True, warnings=(unreadable(name),))


@pytest.mark.parametrize("value", ["9", "9,10", "one two"])
def test_all_gpus_are_shown_with_a_warning_if_every_name_is_invalid(value: str) -> None:
    visible = select_visible(value, BOX)

    assert visible.indices == ALL
    assert not visible.is_filtering
    assert visible.warnings[-1] == all_shown(value)
    assert len(visible.warnings) == len(value.replace(",", " ").split()) + 1


def test_a_box_without_gpus_shows_none_whatever_is_named() -> None:
    assert select_visible("0", ()) == VisibleDevices((), is_filtering=False, warnings=(not_found("0"), all_shown("0")))


@pytest.mark.parametrize("value", ["-1", " -1 ", "-1,0,1", "NoDevFiles", "nodevfiles,0", '"-1"'])
def test_minus_one_or_no_dev_files_at_the_front_hides_all_without_a_warning(value: str) -> None:
    assert select_visible(value, BOX) == VisibleDevices((), is_filtering=True)


@pytest.mark.parametrize("value", ["0,-1,2", "0 -1 junk 99", "0,NoDevFiles,2"])
def test_minus_one_hides_what_follows_it_without_a_warning(value: str) -> None:
    assert select_visible(value, BOX) == VisibleDevices((0,), is_filtering=True)


def test_hiding_on_purpose_is_respected_even_after_invalid_names_only() -> None:
    assert select_visible("9,-1", BOX) == VisibleDevices((), is_filtering=True, warnings=(not_found("9"),))


@pytest.mark.parametrize("name", ["-2", "-01", "-0"])
def test_other_negative_numbers_are_indices_that_are_not_there(name: str) -> None:
    assert select_visible(f"{name},0", BOX) == VisibleDevices((0,), is_filtering=True, warnings=(not_found(name),))


@pytest.mark.parametrize(("value", "index"), [("00", 0), ("01", 1), ("0002", 2)])
def test_leading_zeros_mean_nothing(value: str, index: int) -> None:
    assert select_visible(value, BOX) == VisibleDevices((index,), is_filtering=True)


@pytest.mark.parametrize("value", ['"0,2"', "'0,2'", ' "0, 2" ', '"0","2"', "'0' '2'"])
def test_quotes_around_the_value_or_a_name_are_ignored(value: str) -> None:
    assert select_visible(value, BOX) == VisibleDevices((0, 2), is_filtering=True)


@pytest.mark.parametrize("digits", [19, 400, 5000, 100_000])
def test_a_huge_number_is_an_index_that_is_not_there(digits: int) -> None:
    visible = select_visible("9" * digits + ",1", BOX)

    assert visible.indices == (1,)
    assert visible.warnings == (not_found("9" * digits if digits <= 60 else "9" * 60 + "…"),)


def test_a_huge_invalid_value_is_shortened_in_the_warning() -> None:
    visible = select_visible("x," * 50_000, BOX)

    assert visible.indices == ALL
    assert sum(len(warning) for warning in visible.warnings) < 300


def test_control_characters_do_not_reach_the_warnings() -> None:
    visible = select_visible("\x1b[2J,GPU-\x1b[2J", BOX)

    assert visible.indices == ALL
    assert all(warning.isprintable() for warning in visible.warnings)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 0),
        ("gpu-8932AAAA-0000-4106-C12F-20BD9FAED9F6", 1),
        ("GPU-8932f", 0),
        ("GPU-1", 2),
        ("MIG-5e2e4ab1-2222-4106-c12f-20bd9faed9f6", 3),
        ("mig-5E", 3),
    ],
)
def test_a_uuid_or_an_unambiguous_beginning_of_one_names_its_gpu_in_any_case(name: str, index: int) -> None:
    assert select_visible(name, BOX) == VisibleDevices((index,), is_filtering=True)


def test_an_ambiguous_beginning_is_skipped_with_a_warning() -> None:
    assert select_visible("GPU-8932,2", BOX) == VisibleDevices(
        (2,),
        is_filtering=True,
        warnings=("GPU GPU-8932 in CUDA_VISIBLE_DEVICES is ambiguous: it could be any of GPUs 0, 1",),
    )


def test_a_full_uuid_is_not_ambiguous_even_if_another_one_begins_with_it() -> None:
    gpus = (InstalledGpu(0, "GPU-sim-1"), InstalledGpu(1, "GPU-sim-10"))

    assert select_visible("GPU-sim-1", gpus) == VisibleDevices((0,), is_filtering=True)


def test_a_uuid_that_is_not_there_is_skipped_with_a_warning() -> None:
    assert select_visible("GPU-dead,0", BOX) == VisibleDevices(
        (0,), is_filtering=True, warnings=(not_found("GPU-dead"),)
    )


def test_a_uuid_must_begin_as_named_and_not_merely_contain_it() -> None:
    assert select_visible("GPU-d72c,0", BOX).warnings == (not_found("GPU-d72c"),)


def test_indices_and_uuids_may_be_mixed() -> None:
    assert select_visible("GPU-1f3c,0", BOX) == VisibleDevices((0, 2), is_filtering=True)


@pytest.mark.parametrize("value", ["1,1", "1,01", "1 GPU-8932aaaa", "1,1,1"])
def test_a_gpu_named_more_than_once_is_kept_once_with_one_warning(value: str) -> None:
    assert select_visible(value, BOX) == VisibleDevices((1,), is_filtering=True, warnings=(named_twice(1),))


boxes = st.lists(
    st.builds(InstalledGpu, st.integers(0, 20), st.from_regex(r"(GPU|MIG)-[0-9a-f]{1,6}", fullmatch=True)),
    unique_by=lambda gpu: gpu.index,
    max_size=8,
)
names = st.one_of(
    st.integers(-3, 25).map(str),
    st.from_regex(r"(GPU|mig)-[0-9a-f]{0,6}", fullmatch=True),
    st.sampled_from(["NoDevFiles", "-1", "1.5", "0x1", '"0"', ""]),
    st.text(max_size=8),
)
values = st.one_of(
    st.none(),
    st.text(),
    st.lists(st.tuples(names, st.sampled_from([",", " ", "\t", ", "]))).map(
        lambda parts: "".join(name + separator for name, separator in parts)
    ),
)


@given(values, boxes)
def test_only_installed_gpus_are_shown_ascending_and_once(value: str | None, gpus: list[InstalledGpu]) -> None:
    visible = select_visible(value, gpus)

    assert set(visible.indices) <= {gpu.index for gpu in gpus}
    assert list(visible.indices) == sorted(set(visible.indices))


@given(values, boxes)
def test_all_gpus_are_shown_whenever_there_is_no_filtering(value: str | None, gpus: list[InstalledGpu]) -> None:
    visible = select_visible(value, gpus)

    assert visible.is_filtering or visible.indices == tuple(sorted(gpu.index for gpu in gpus))


@given(values, boxes)
def test_writing_the_result_back_shows_the_same_gpus_without_a_warning(
    value: str | None, gpus: list[InstalledGpu]
) -> None:
    first = select_visible(value, gpus)

    again = select_visible(",".join(map(str, first.indices)), gpus)

    assert again == VisibleDevices(first.indices, is_filtering=True)


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
