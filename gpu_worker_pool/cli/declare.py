"""How a command declares its options and arguments, in its signature, and how they are read from what was typed.

    def status(endpoint: Endpoints = None, *, mine: Annotated[bool, Option("--mine", help="Only yours.")] = False) -> None:

A dataclass as the type of a parameter declares what several commands have in common: a field is an option. The docstring is
the help. A value is converted by the annotation, or by `parser`, which raises a ValueError that says what
is wrong. `argparse` reads the options; a parser is made for the one command that was typed.
"""

from __future__ import annotations

import argparse
import re
import types
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, get_args, get_origin, get_type_hints

from gpu_worker_pool.failure import USAGE, Failure

from .output import wrap

MORE: Final = "More options"
# These mean the same for every command that has them: the help of a command only names them.
COMMON: Final = "Options of most commands"
_COLUMN: Final = 26
_SCREEN: Final = 40


class Option:
    """An option, by its flags: `--gpus`, `-g`. Without one, it is named after its parameter."""

    def __init__(
        self,
        *flags: str,
        help: str = "",  # noqa: A002 - as argparse calls it
        metavar: str | None = None,
        parser: Callable[[str], Any] | None = None,
        min: float | None = None,  # noqa: A002
        max: float | None = None,  # noqa: A002
        group: str | None = None,
        hidden: bool = False,
        complete: Callable[[str], list[tuple[str, str]]] | None = None,
    ) -> None:
        self.flags, self.help, self.metavar, self.parser = flags, help, metavar, parser
        self.min, self.max, self.group, self.hidden, self.complete = min, max, group, hidden, complete


class Argument(Option):
    """A word without a flag; a list takes all that follow. `-- CMD` takes everything after the first word that is not an
    option.
    """


class Parameter:
    """One option or argument of a command: its declaration, its type and its default."""

    def __init__(self, name: str, hint: Any, default: Any) -> None:
        assert get_origin(hint) is Annotated, name  # noqa: S101 - a mistake in a command
        self.name, self.default = name, default
        self.type, self.declared = get_args(hint)
        alternatives = get_args(self.type) if isinstance(self.type, types.UnionType) else (self.type,)
        kinds = [kind for kind in alternatives if kind is not type(None)]
        self.type = kinds[0]
        self.is_list = get_origin(self.type) is list
        self.item = get_args(self.type)[0] if self.is_list else self.type
        self.is_argument = isinstance(self.declared, Argument)

    @property
    def takes_rest(self) -> bool:
        """Whether all words from the first one on belong to a command that is to be run."""
        return (self.declared.metavar or "").startswith("-- ")

    @property
    def flags(self) -> tuple[str, ...]:
        return self.declared.flags or (f"--{self.name.strip('_').replace('_', '-')}",)

    def convert(self, text: str) -> Any:
        """The value that was typed; a ValueError says what is wrong with it."""
        if self.declared.parser is not None:
            return self.declared.parser(text)
        if self.item in {int, float}:
            return self._number(text)
        if issubclass(self.item, Enum):
            words = [str(member.value) for member in self.item]
            if text not in words:
                raise ValueError(f"{text!r} is unknown; write {', '.join(words[:-1])} or {words[-1]}")
        return self.item(text) if issubclass(self.item, Enum | Path) else text

    def _number(self, text: str) -> float:
        low, high = self.declared.min, self.declared.max
        try:
            number = float(self.item(text))
        except ValueError:
            number = float("nan")
        if not (-1e300 if low is None else low) <= number <= (1e300 if high is None else high):
            kind = "a whole number" if self.item is int else "a number"
            span = f" from {low} to {high}" if low is not None and high is not None else ""
            span = span or ("" if low is None else f" of at least {low}")
            raise ValueError(f"{text!r} is not {kind}{span}")
        return int(number) if self.item is int else number

    def add_to(self, parser: argparse.ArgumentParser, groups: dict[str, Any]) -> None:
        declared = self.declared
        shown: dict[str, Any] = {"help": declared.help.replace("%", "%%")}
        if self.is_argument:
            is_optional = self.default is not _MISSING
            number = argparse.REMAINDER if self.takes_rest else "*" if self.is_list else "?" if is_optional else None
            parser.add_argument(
                self.name, nargs=number, metavar=declared.metavar or self.name.upper(), type=_typed(self), **shown
            )
            return
        title = declared.group or "Options"
        if title == COMMON or declared.hidden:
            shown = {"help": argparse.SUPPRESS}
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        shown |= {"dest": self.name, "default": None if self.default is _MISSING else self.default}
        if self.type is bool:
            groups[title].add_argument(*self.flags, action="store_const", const=True, **shown)
            return
        action = "append" if self.is_list else "store"
        metavar = declared.metavar or ("NUMBER" if self.item in {int, float} else self.name.strip("_").upper())
        groups[title].add_argument(*self.flags, action=action, type=_typed(self), metavar=metavar, **shown)


_MISSING: Final = object()


def parameters(function: Callable[..., Any]) -> list[Parameter]:
    """What a command declares, in the order of its signature."""
    hints = get_type_hints(function, include_extras=True)
    code, given = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    defaults = dict(zip(positional[len(positional) - len(given) :], given, strict=True))
    defaults |= function.__kwdefaults__ or {}
    found = []
    for name in names:
        fields = getattr(hints[name], "__dataclass_fields__", None)
        if fields is None:
            found.append(Parameter(name, hints[name], defaults.get(name, _MISSING)))
        else:
            types_of = get_type_hints(hints[name], include_extras=True)
            found += [Parameter(field, types_of[field], declared.default) for field, declared in fields.items()]
    return found


def _common(function: Callable[..., Any]) -> dict[str, type]:
    """The parameters of a command that are dataclasses of options."""
    hints = get_type_hints(function, include_extras=True)
    return {name: hint for name, hint in hints.items() if hasattr(hint, "__dataclass_fields__")}


def _typed(parameter: Parameter) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parameter.convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help as manuals have it: paragraphs are wrapped, and usage names the arguments."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_COLUMN)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = "Usage: ") -> None:
        super().add_usage(usage, actions, groups, prefix)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return str(action.metavar)
        # `-g, --gpus NUMBER`: the value once.
        short_first = sorted(action.option_strings, key=lambda flag: flag.startswith("--"))
        value = f" {action.metavar}" if action.nargs != 0 and action.metavar else ""
        return f"{', '.join(short_first)}{value}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:  # noqa: ARG002 - as argparse has it
        paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
        return "\n\n".join("\n".join(self._split_lines(paragraph, width)) for paragraph in paragraphs)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width)  # not at hyphens: `gpu-pool` is one word


class HelpWanted(Exception):  # noqa: N818 - what was typed
    """`--help` was typed; the text is the help."""


class _OptionParser(argparse.ArgumentParser):
    def print_help(self, file: Any = None) -> NoReturn:  # noqa: ARG002 - as argparse has it
        raise HelpWanted

    def error(self, message: str) -> NoReturn:
        text = re.sub(r"^argument ([^:]+): ", lambda found: f"{found[1].rpartition('/')[0] or found[1]}: ", message)
        text = text.replace("expected one argument", "needs a value")
        text = re.sub(r"^the following arguments are required: ", "give ", text)
        raise Failure(f"{text} (see `{self.prog} --help`)", USAGE)


def help_of(path: str, function: Callable[..., Any], *, is_whole: bool = False) -> str:
    """The help of a command. One that is longer than a screen has a first level, which leaves most of it to the whole help."""
    text = parser_of(path, function).format_help()
    if is_whole or len(text.splitlines()) <= _SCREEN:
        return text
    return parser_of(path, function, is_short=True).format_help()


def parser_of(path: str, function: Callable[..., Any], *, is_short: bool = False) -> argparse.ArgumentParser:
    """The parser of a command, which is typed so: `gpu-pool quota set`. One that `is_short` is for the first level of help."""
    declared = parameters(function)
    words = [each.declared.metavar or each.name.upper() for each in declared if each.is_argument]
    help_text = re.sub(r"`([^`\n]+)`", r"\1", function.__doc__ or "")
    more = [each for each in declared if each.declared.group == MORE and is_short]
    if is_short:
        declared = [each for each in declared if each not in more]
        help_text = help_text.partition("\n\n")[0]
    program, _, command = path.partition(" ")
    feet = []
    if more:
        names = ", ".join(each.flags[0] for each in more)
        feet = [f"More options: {names}.", f"`{program} help {command}` explains these, and everything else."]
    if common := [each.flags[0] for each in declared if each.declared.group == COMMON]:
        also = f"Also {', '.join(common)}: see `{program} --help`."
        feet = [*feet[:-1], f"{feet[-1]} {also}" if feet else also]
    parser = _OptionParser(
        prog=path,
        usage=" ".join([path, "[OPTIONS]", *words]).replace("%", "%%"),
        description=help_text.replace("%", "%%"),
        epilog="\n\n".join(feet) or None,
        formatter_class=_Formatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser._positionals.title = "Arguments"  # noqa: SLF001 - argparse has no other way to name them
    groups: dict[str, Any] = {}
    for each in sorted(declared, key=lambda each: each.declared.group is not None):
        each.add_to(parser, groups)
    last = groups.get("Options") or parser.add_argument_group("Options")
    last.add_argument("-h", "--help", action="help", help="Show this help.")
    return parser


def read(path: str, function: Callable[..., Any], typed: Sequence[str]) -> dict[str, Any]:
    """The values for the parameters of a command, as they were typed. Failure for what it does not understand."""
    parser = parser_of(path, function)
    # With options between the words of a list: `drain 0 --reason fan 1`.
    is_mixed = any(each.is_argument and each.is_list and not each.takes_rest for each in parameters(function))
    try:
        found, unknown = (parser.parse_known_intermixed_args if is_mixed else parser.parse_known_args)(list(typed))
    except HelpWanted:
        raise HelpWanted(help_of(path, function)) from None
    if unknown:
        raise Failure(_unknown(path, function, unknown), USAGE)
    values = vars(found)
    for each in parameters(function):
        if each.is_argument and each.is_list:
            given = values[each.name]
            # A shell's `--` says where the command begins, and is not a part of it.
            values[each.name] = given[1:] if given[:1] == ["--"] else given
            if not values[each.name] and each.default is not _MISSING:
                values[each.name] = each.default
            elif not values[each.name]:
                raise Failure(f"give {each.declared.metavar or each.name} (see `{path} --help`)", USAGE)
    for name, options in _common(function).items():
        values[name] = options(**{field: values.pop(field) for field in options.__dataclass_fields__})  # type: ignore[attr-defined]
    return values


def _unknown(path: str, function: Callable[..., Any], unknown: Sequence[str]) -> str:
    from .foreign import hint_for  # noqa: PLC0415 - only where something is wrong

    word = unknown[0].partition("=")[0]
    see = f"(see `{path} --help`)"
    if not word.startswith("-"):
        return f"{word!r} is one word too many {see}"
    if (hint := hint_for(word)) is not None:
        return f"there is no option {word} here: {hint}"
    import difflib  # noqa: PLC0415

    known = list(flags_of(function))
    near = difflib.get_close_matches(word, known, 2) or [flag for flag in known if flag.startswith(word)]
    meant = f"; did you mean {' or '.join(near[:2])}?" if near else ""
    return f"there is no option {word}{meant} {see}"


def flags_of(function: Callable[..., Any]) -> Iterator[str]:
    """The options that the help of a command shows."""
    for each in parameters(function):
        if not each.is_argument and not each.declared.hidden:
            yield from each.flags
    yield "--help"
