"""Names of recorded events: kernels as people read them, classes of kernels, and the places in the user's code that they come from.

`short_names` leaves out namespaces, parameters and template arguments that tell nothing apart.

>>> short_names(["void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float> >(int, float)"])
['vectorized_elementwise_kernel<AddFunctor>']

`kernel_class` tells what a kernel computes, "gemm" or "convolution". Libraries do not say what their kernels are; names do, by
habits that are stable for years (cuBLAS and hipBLASLt: gemm, Cijk, nvjet; cuDNN: fprop, dgrad, wgrad, bn; PyTorch: the name of the
template). What no pattern fits is "other".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpro_search._text import shortened
from dpro_search.collect.trace import Ints, Trace

# The first that fits decides: a convolution's kernel may be called an implicit GEMM, an optimizer's an element-wise one.
_PATTERNS = (
    ("optimizer", r"multi_tensor_apply|adam|adagrad|lamb_|sgd_|optimizer"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("convolution", r"conv(?!ert)|fprop|dgrad|wgrad|winograd|scudnn|fft[12]d|flip_filter"),
    ("layout", r"nchwto|nhwcto|transpose|computeb?offsets"),
    ("normalization", r"batch_?norm|layer_?norm|group_?norm|rms_?norm|cudnn::bn|bn_fw|bn_bw"),
    ("embedding", r"embedding|index_?select|index_put|indexing|indices|gather|scatter|permute"),
    ("gemm", r"gemm|gemv|cutlass|cublas|xmma|splitk|cijk_|nvjet|matmul|dot_kernel"),
    ("softmax", r"soft_?max|nll_loss|cross_entropy|dropout"),
    ("pooling", r"pool"),
    ("elementwise", r"elementwise|catarray|fill|copy|cast|triton_poi"),
    ("reduction", r"reduc|triton_red|triton_per|norm|cub::|sort|scan"),
)
_CLASSES = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _PATTERNS)
OTHER = "other"
KERNEL_CLASSES = (*(name for name, _ in _PATTERNS), OTHER)
_MOST = 120  # characters; mangled names and those of generated kernels have no end
_MOST_OF_ARGUMENTS = 32
_CLOSING = {"<": ">", "(": ")", "{": "}"}
_LEFT_OUT = re.compile(r"\(anonymous namespace\)::|\bvoid (?=[\w(])|\bstd::enable_if<[^;]*?>::type ")
_NAMESPACES = re.compile(r"(?:\b\w+::)+(?=\w)")
_SAYS_NOTHING = re.compile(r"(?:\b\w+::)*?((?:\b\w+::)?\b[Kk]ernel)$")
_FUNCTOR = re.compile(r"\w*(?:kernel|functor|_cuda|tensorop)\w*", re.IGNORECASE)
_WORD = re.compile(r"\b\w+\b(?!::)")
_WRAPPER = re.compile(r"gpu_kernel_impl\w*|\w*?(?:Unary|Binary|Ternary)Functor")
KEYS = ("framework_op", "module", "source")


def kernel_class(name: str) -> str:
    """One of `KERNEL_CLASSES`."""
    return next((title for title, pattern in _CLASSES if pattern.search(name)), OTHER)


@dataclass(frozen=True)
class _NameParts:
    """A name: up to its template arguments, these, and what follows the parameters."""

    head: str
    arguments: tuple[str, ...]
    tail: str

    @property
    def functor(self) -> str:
        """The function that the template applies: its first argument, at any depth, that is a function and no wrapper."""
        functors = [word for word in _FUNCTOR.findall(" ".join(self.arguments)) if not _WRAPPER.fullmatch(word)]
        return functors[0] if functors else ""

    def with_arguments(self, shown: Sequence[str]) -> str:
        """The name with these in place of its arguments."""
        inside = ", ".join(filter(None, shown))
        nothing = _SAYS_NOTHING.search(self.head)
        if nothing:
            head, inside = self.head[: nothing.start()] + (inside or nothing[1]), ""
        else:
            head = _NAMESPACES.sub("", self.head)
        return shortened(head + (f"<{inside}>" if inside else "") + self.tail, _MOST)


def short_names(names: Sequence[str]) -> list[str]:
    """A short name for each. Names that differ stay different: they then have the template arguments in which they differ.

    Text around a kernel's name ("launch of", "@3") is kept.
    """
    parts = {name: _parts(name) for name in names}
    short: dict[str, str] = {}
    for group in _alike({name: name_parts.with_arguments([name_parts.functor]) for name, name_parts in parts.items()}):
        distinct = _told_apart({name: parts[name] for name in group}) if len(group) > 1 else {}
        short |= distinct or {name: parts[name].with_arguments([parts[name].functor]) for name in group}
    for group in _alike(short):
        short |= {name: f"{short[name]} (variant {number})" for number, name in enumerate(group, 1) if len(group) > 1}
    return [short[name] for name in names]


def _alike(short: Mapping[str, str]) -> list[list[str]]:
    """Names by their short name."""
    names_of_text: dict[str, list[str]] = {}
    for name, text in short.items():
        names_of_text.setdefault(text, []).append(name)
    return list(names_of_text.values())


def _told_apart(parts: Mapping[str, _NameParts]) -> dict[str, str]:
    """Names with the arguments in which they differ or, where these are long, with the words in them that not all have."""
    places = range(max(len(name_parts.arguments) for name_parts in parts.values()))
    differ = [place for place in places if len({name_parts.arguments[place : place + 1] for name_parts in parts.values()}) > 1]
    words = {name: list(dict.fromkeys(_WORD.findall(" ".join(name_parts.arguments)))) for name, name_parts in parts.items()}
    common = set.intersection(*map(set, words.values()))
    distinct = {}
    for name, name_parts in parts.items():
        kept = [_NAMESPACES.sub("", name_parts.arguments[place]) for place in differ if place < len(name_parts.arguments)]
        if len(", ".join(kept)) > _MOST_OF_ARGUMENTS:
            kept = [word for word in words[name] if word not in common and word != name_parts.functor]
        distinct[name] = name_parts.with_arguments(
            kept if any(name_parts.functor in one for one in kept) else [name_parts.functor, *kept]
        )
    return distinct


def _parts(name: str) -> _NameParts:
    """A C++ name at its last template arguments; any other text as it is."""
    pieces = _pieces(_LEFT_OUT.sub("", name))
    templates = [place for place, piece in enumerate(pieces) if piece.startswith("<")]
    calls = [place for place, piece in enumerate(pieces) if piece.startswith("(")]
    ends = templates[-1] if templates else calls[0] if calls else len(pieces)
    texts = ["" if piece[0] in _CLOSING else piece for piece in pieces]
    arguments = _arguments(pieces[ends]) if templates else ()
    return _NameParts("".join(texts[:ends]), arguments, "".join(texts[ends:]))


def _pieces(text: str) -> list[str]:
    """Text, and groups of brackets that follow a word or another group; "(Pinned -> Device)" after a space is text."""
    ends = _groups(text)
    pieces, start, place = [], 0, 0
    while place < len(text):
        follows = place > 0 and (text[place - 1].isalnum() or text[place - 1] in "_>)}")
        if not follows or text[place] not in "<(" or place not in ends:
            place += 1
            continue
        pieces += [text[start:place]] * (place > start) + [text[place : ends[place]]]
        start = place = ends[place]
    return pieces + [text[start:]] * (start < len(text))


def _arguments(group: str) -> tuple[str, ...]:
    """The arguments between the brackets of a group."""
    inner, arguments, start, place = group[1:-1], [], 0, 0
    ends = _groups(inner)
    while place < len(inner):
        if inner[place] == ",":
            arguments.append(inner[start:place].strip())
            start = place + 1
        place = ends.get(place, place + 1)
    return (*arguments, inner[start:].strip())


def _groups(text: str) -> dict[int, int]:
    """Begin and end of each closed group of brackets. A ">" closes only a group of "<", unlike the one in "->"."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for place, character in enumerate(text):
        if character in _CLOSING:
            opened.append(place)
        elif character == ">" and opened and text[opened[-1]] == "<":
            ends[opened.pop()] = place + 1
        elif character in ")}":
            while opened and text[opened[-1]] == "<":
                opened.pop()  # was "less than"
            if opened and _CLOSING[text[opened[-1]]] == character:
                ends[opened.pop()] = place + 1
    return ends


def origins(trace: Trace, events: Ints) -> list[dict[str, str]]:
    """The known origins of each event: some of `KEYS`."""
    table = trace.events
    columns = [column[events].tolist() for column in (table.op, table.module, table.source)]
    return [
        {key: trace.names[number] for key, number in zip(KEYS, numbers, strict=True) if number >= 0}
        for numbers in zip(*columns, strict=True)
    ]


def origin_text(row: Mapping[str, Any]) -> str:
    """An origin in one line: "aten::addmm in Net_0.Linear_0, train.py(6): forward"; empty where nothing is known."""
    op, module, source = (row.get(key, "") for key in KEYS)
    others = row.get("origins", 0) - 1
    text = ", ".join(filter(None, (" in ".join(filter(None, (op, module))), source)))
    return f"{text}, and {others} other {'place' if others == 1 else 'places'}" if text and others > 0 else text
