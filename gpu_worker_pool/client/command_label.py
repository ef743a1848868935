"""The name of a command for others to see: its script or module, without options and values, which may be secrets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import PurePath
from typing import Final

from gpu_worker_pool.wire.bounds import is_printable

_MAX_LABEL: Final = 200


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """A program that runs another one: its options without a value (`flags`), and those with one (`values`).

    `subcommands`: words one of which must come first. `operands`: how many words come before the command.
    `modules`: options after which a Python module is named. `is_python`: the command is a Python script.
    """

    flags: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()
    subcommands: frozenset[str] = frozenset()
    operands: int = 0
    modules: frozenset[str] = frozenset()
    is_python: bool = False


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MODULE: Final = _words("-m --module")
_PYTHON: Final = _Wrapper(
    _words("-b -B -d -E -h -i -I -O -OO -P -q -s -S -u -v -x -bb -vv -? --help --version -V"),
    _words("-W -X --check-hash-based-pycs"),
    modules=_words("-m"),
)
_SHELL: Final = _Wrapper(
    _words(
        "-e -i -l -n -p -r -s -u -v -x -a -b -f -h -k -t -B -C -E -H -P -T --login --posix --noprofile --norc --verbose"
    ),
    _words("-o -O +o +O --rcfile --init-file"),
)
_TORCHRUN: Final = _Wrapper(
    _words("--standalone --no-python --no_python --run-path --run_path --use-env --use_env -h --help"),
    _words("-t -r"),
    modules=_MODULE,
    is_python=True,
)
_ACCELERATE: Final = _Wrapper(
    _words(
        "--multi_gpu --multi-gpu --cpu --tpu --mps --use_deepspeed --use-deepspeed --use_fsdp --use-fsdp --use_xpu --quiet -q "
        "--no_python --no-python --debug --use_megatron_lm --use_cpu --same_network --ipex --tpu_use_cluster "
        "--tpu_use_sudo --dynamo_use_fullgraph --dynamo_use_dynamic"
    ),
    subcommands=_words("launch"),
    modules=_MODULE,
    is_python=True,
)
_DEEPSPEED: Final = _Wrapper(
    _words("--no_python --no_local_rank --force_multi --save_pid --elastic_training --bind_cores_to_rank"),
    modules=_MODULE,
    is_python=True,
)
_UV: Final = _Wrapper(
    _words(
        "--all-extras --all-groups --all-packages --active --compile-bytecode --exact --frozen --isolated --locked --managed-python "
        "--native-tls --no-binary --no-build --no-build-isolation --no-cache -n --no-config --no-default-groups --no-dev "
        "--no-editable --no-env-file --no-index --no-managed-python --no-progress --no-project --no-python-downloads --no-sources "
        "--no-sync --offline --only-dev --dev --preview --quiet -q --refresh --reinstall --script -s --gui-script --upgrade -U "
        "--verbose -v"
    ),
    _words(
        "--with --with-editable --with-requirements --extra --no-extra --group --no-group --only-group --env-file --package -p "
        "--python --project --directory --cache-dir --config-file --index --default-index -i --index-url --extra-index-url -f "
        "--find-links --color --link-mode --resolution --prerelease --python-platform -P --upgrade-package"
    ),
    _words("run"),
    modules=_MODULE,
)
_CONDA: Final = _Wrapper(
    _words("--no-capture-output --live-stream -v --verbose --dev --debug-wrapper-scripts"),
    _words("-n --name -p --prefix --cwd"),
    _words("run"),
)
_TASKS: Final = _Wrapper(
    _words("-q --quiet -v --verbose -n --no-interaction --no-plugins --ansi --no-ansi"),
    _words("-C --directory -P --project -e --environment"),
    _words("run"),
)
_SRUN: Final = _Wrapper(
    _words(
        "-E -H -K -l -O -Q -s -u -v -X -Z --contiguous --disable-status --exact --exclusive --hold --immediate -I --label "
        "--kill-on-bad-exit --multi-prog --no-allocate --overcommit --oversubscribe --overlap --preserve-env --pty --quiet "
        "--reboot --spread-job --unbuffered --use-min-nodes --verbose -k --no-kill"
    ),
    _words(
        "-W --wait -n --ntasks -N --nodes -c --cpus-per-task -p --partition -t --time -J --job-name -G --gpus -w --nodelist -A --account "
        "-o --output -e --error -i --input -q --qos -D --chdir -C --constraint -m --distribution --mem --gres --mpi -x --exclude"
    ),
)
_MPIRUN: Final = _Wrapper(
    _words("--allow-run-as-root --oversubscribe -q -v --verbose --bind-to-core --tag-output --use-hwthread-cpus"),
    _words("-n -np -c -N -x -H -host --host -hostfile --hostfile --map-by --bind-to -wdir --wdir -p --port"),
)

# By the name of the program, without its version: python3.11 is python.
_WRAPPERS: Final[dict[str, _Wrapper]] = {
    "python": _PYTHON,
    "pypy": _PYTHON,
    **dict.fromkeys(("sh", "bash", "dash", "zsh", "ksh"), _SHELL),
    "torchrun": _TORCHRUN,
    "accelerate": _ACCELERATE,
    "accelerate-launch": _Wrapper(_ACCELERATE.flags, modules=_MODULE, is_python=True),
    "deepspeed": _DEEPSPEED,
    "uv": _UV,
    **dict.fromkeys(("conda", "mamba", "micromamba"), _CONDA),
    **dict.fromkeys(("poetry", "pdm", "pipenv", "hatch", "rye", "pixi"), _TASKS),
    "srun": _SRUN,
    **dict.fromkeys(("mpirun", "mpiexec", "horovodrun"), _MPIRUN),
    "env": _Wrapper(_words("-i --ignore-environment -0 --null -v --debug -"), _words("-u --unset -C --chdir")),
    "nohup": _Wrapper(),
    "time": _Wrapper(_words("-p -v --verbose --portability -a --append -q --quiet"), _words("-f --format -o --output")),
    "nice": _Wrapper(values=_words("-n --adjustment")),
    "ionice": _Wrapper(_words("-t --ignore"), _words("-c --class -n --classdata")),
    "stdbuf": _Wrapper(values=_words("-i -o -e --input --output --error")),
    "setsid": _Wrapper(_words("-c --ctty -f --fork -w --wait")),
    "timeout": _Wrapper(
        _words("--foreground --preserve-status -v --verbose -f -p"), _words("-k --kill-after -s --signal"), operands=1
    ),
    "taskset": _Wrapper(_words("-a --all-tasks -c --cpu-list"), operands=1),
    "numactl": _Wrapper(
        _words("-l --localalloc -a --all"), _words("-N -C -m -i -p --cpunodebind --physcpubind --membind")
    ),
    "sudo": _Wrapper(
        _words("-E -H -n -S -k -b -i -s --preserve-env --non-interactive"), _words("-u --user -g --group")
    ),
    "xvfb-run": _Wrapper(_words("-a --auto-servernum -l --listen-tcp"), _words("-n --server-num -s --server-args")),
    "exec": _Wrapper(_words("-c -l"), _words("-a")),
}
# Launchers that are run as modules.
_LAUNCHING_MODULES: Final = {
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "accelerate.commands.launch": _WRAPPERS["accelerate-launch"],
    "deepspeed.launcher.runner": _DEEPSPEED,
}


def command_label(command: Sequence[str]) -> str:
    """The script or module that a command line runs: `train.py`, `my.module`; where it has none, its program.

    Words with `=`, options, their values and all that follows the script are left out.
    """
    return label_text(_script(list(command)) or "")


def label_text(text: str) -> str:
    """`text` as a server accepts it in a label: each run of characters that it refuses becomes a blank."""
    # A name on the command line need not be UTF-8.
    readable = text.encode("utf-8", "replace").decode("utf-8")
    runs = groupby(readable, is_printable)
    return "".join("".join(run) if is_accepted else " " for is_accepted, run in runs)[:_MAX_LABEL].strip()


def _script(words: list[str]) -> str | None:
    """The name that says most of what these words run; None where no word may be shown."""
    while words and "=" in words[0]:
        words = words[1:]  # variables, as after `env`
    if not words or words[0].startswith("-"):
        return None
    program = PurePath(words[0]).name
    wrapper = _WRAPPERS.get(program.rstrip("0123456789."))
    if wrapper is None:
        return program
    return _inner(wrapper, words[1:]) or program


def _inner(wrapper: _Wrapper, words: list[str]) -> str | None:
    """What a wrapper runs, by the words after its name; None where that is not certain."""
    left = _Left(words)
    if wrapper.subcommands and not left.skip_to(wrapper):
        return None
    operands = wrapper.operands
    while (word := left.take()) is not None:
        if word == "--" and not operands:
            return _run_by(wrapper, left)
        if wrapper.modules and (module := _module(wrapper, word, left)):
            return module
        if not word.startswith(("-", "+")) or word == "-":
            if "=" in word or word in wrapper.flags:
                continue
            if not operands:
                left.words = [word, *left.words]
                return _run_by(wrapper, left)
            operands -= 1
        elif wrapper in {_PYTHON, _SHELL} and not word.startswith("--") and "c" in word:
            return None  # its program is in the word, or in the next
        elif wrapper is _SHELL and not word.startswith("--") and "s" in word:
            return None  # its program is its input
        else:
            left.skip_value(wrapper, word)
    return None


def _module(wrapper: _Wrapper, word: str, left: _Left) -> str | None:
    """The module that an option names: in the next word, or in the same (`-mpip`, `-um`); or what that module runs."""
    name = None
    if word in wrapper.modules:
        name = left.take()
    elif wrapper is _PYTHON and not word.startswith("--") and word.startswith("-") and "m" in word:
        flags, _, attached = word[1:].partition("m")
        if all(f"-{flag}" in wrapper.flags for flag in flags):
            name = attached or left.take()
    if name is None or "=" in name or name.startswith("-"):
        return None
    launcher = _LAUNCHING_MODULES.get(name)
    return (_inner(launcher, left.words) if launcher else None) or name


def _run_by(wrapper: _Wrapper, left: _Left) -> str | None:
    words = left.words
    if not words or words[0].startswith("-") or (not left.is_certain and not _is_program(words[0])):
        return None
    if "=" not in words[0] and (wrapper.is_python or wrapper in {_PYTHON, _SHELL}):
        return PurePath(words[0]).name or None  # a file, whatever its name
    return _script(words)


def _is_program(word: str) -> bool:
    """Whether a word looks like a program or script, and not like the value of an option."""
    name = PurePath(word).name
    return (
        "=" not in word
        and " " not in word
        and (name.endswith((".py", ".sh")) or name.rstrip("0123456789.") in _WRAPPERS)
    )


@dataclass(slots=True)
class _Left:
    """The words that have not been read yet. `is_certain`: no word was left out that may have been the command."""

    words: list[str] = field(default_factory=list)
    is_certain: bool = True

    def take(self) -> str | None:
        if not self.words:
            return None
        word, self.words = self.words[0], self.words[1:]
        return word

    def skip_to(self, wrapper: _Wrapper) -> bool:
        """Read up to the subcommand; False where another one comes first."""
        while (word := self.take()) is not None:
            if word in wrapper.subcommands:
                return True
            if not word.startswith("-"):
                return False
            self.skip_value(wrapper, word)
        return False

    def skip_value(self, wrapper: _Wrapper, option: str) -> None:
        """Leave out the word that is the value of this option, or may be."""
        takes_value = _takes_value(wrapper, option)
        if takes_value:
            self.take()
        elif (
            takes_value is None and self.words and not self.words[0].startswith("-") and not _is_program(self.words[0])
        ):
            self.take()
            self.is_certain = False


def _takes_value(wrapper: _Wrapper, option: str) -> bool | None:
    """Whether the next word is the option's value; None where that is not known."""
    if option in wrapper.values:
        return True
    if option in wrapper.flags or "=" in option:
        return False
    if option.startswith("--"):
        return None
    for position, letter in enumerate(option[1:], start=2):  # several in one word: -eu, -n4, -eo
        if f"{option[0]}{letter}" in wrapper.values:
            return position == len(option)
        if f"{option[0]}{letter}" not in wrapper.flags:
            return None
    return False
