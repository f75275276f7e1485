"""Which layers of a model a method means: those that get matrices, and those that are trained as a whole."""

import difflib
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from tunewell.config.schema import Method
from tunewell.core.errors import UserError
from tunewell.models.peft_format import Selection, ending_of, is_named, is_within, layer_of, twins_of


def chosen_layers(model: PreTrainedModel, method: Method) -> Selection:
    """Find the layers that a method names; raise UserError where it names what is not there, or one thing twice."""
    linears = linears_of(model)
    is_all = method.targets == "all-linear"
    wanted = tuple(linears) if is_all else _matching(linears, method.targets, "linear layer")
    layers = None if method.layers == "all" else tuple(method.layers)
    if layers is not None:
        _refuse_layers(linears, layers)
        wanted = tuple(name for name in wanted if layer_of(name) in layers)
    names = [name for name, _ in model.named_modules() if name]
    whole = with_twin(model, outermost(_matching(names, method.modules_to_save, "module")))
    if empty := [name for name in whole if next(model.get_submodule(name).parameters(), None) is None]:
        raise UserError(
            f"`{empty[0]}` has no weights to train",
            where="`method.modules_to_save`",
            fix=f"take `{ending_of(empty[0])}` out of it",
        )
    for end in () if is_all else method.targets:
        own = [name for name in wanted if is_named(name, end)]
        if own and all(is_within(name, whole) for name in own):
            raise UserError(
                f"`{end}` cannot both get matrices beside it and be trained as a whole",
                where="`method.targets` and `method.modules_to_save`",
                fix=f"take `{end}` out of one of them",
            )
    kept = tuple(name for name in wanted if not is_within(name, whole))
    if not kept:
        raise UserError(
            "no linear layer is left to put an adapter on",
            where=f"`method.targets` {method.targets!r}, `method.layers` {method.layers!r}, "
            f"`method.modules_to_save` {method.modules_to_save!r}",
            fix="the model's linear layers are: " + ", ".join(endings_of(linears)),
        )
    return Selection(
        linears=kept,
        whole=whole,
        endings=tuple(endings_of(kept)) if is_all else tuple(method.targets),
        layers=layers,
        saved_by=method.modules_to_save,
    )


def _refuse_layers(linears: Iterable[str], layers: Iterable[int]) -> None:
    there = sorted({number for name in linears if (number := layer_of(name)) is not None})
    if missing := [number for number in layers if number not in there]:
        has = f"its layers are {there[0]} to {there[-1]}" if there else "its layers have no numbers"
        raise UserError(
            f"the model has no layer {', '.join(map(str, missing))}",
            where=f"`method.layers` {list(layers)}",
            fix=f"{has}, and its linear layers: {', '.join(endings_of(linears))}",
        )


def outermost(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out modules that lie in others: they are trained with those."""
    return tuple(name for name in modules if not is_within(name, (own for own in modules if own != name)))


def with_twin(model: PreTrainedModel, whole: tuple[str, ...]) -> tuple[str, ...]:
    """Train the embedding with the head and the head with the embedding, where the two are one."""
    twins = twins_of(model)
    return tuple(dict.fromkeys([*whole, *twins])) if set(twins) & set(whole) else whole


def linears_of(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """List the linear layers by path; the head is none of them, nor is a router that only looks like one."""
    head = model.get_output_embeddings()
    # The router of PhiMoE is made of `nn.Linear` and answers with three tensors.
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and "Router" not in type(module).__name__
    }


def _matching(names: Iterable[str], endings: Iterable[str], kind: str) -> tuple[str, ...]:
    known = list(names)
    for end in endings:
        if not any(is_named(name, end) for name in known):
            close = difflib.get_close_matches(end, endings_of(known), n=1)
            hint = f"did you mean `{close[0]}`? " if close else ""
            raise UserError(
                f"the model has no {kind} `{end}`", fix=f"{hint}it has: {', '.join(endings_of(known)[:20])}"
            )
    return tuple(name for name in known if any(is_named(name, end) for end in endings))


def endings_of(names: Iterable[str]) -> list[str]:
    return sorted({ending_of(name) for name in names})
