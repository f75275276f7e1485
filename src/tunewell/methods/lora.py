"""LoRA: low-rank adapters for frozen linear layers, and fully fine-tuned modules (`modules_to_save`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunewell.config.schema import MethodSettings
from tunewell.core.errors import UserError
from tunewell.methods.base import AdapterLayer, AdapterMethod, MethodFiles, trainable_parameters
from tunewell.methods.peft_format import (
    AdapterSpec,
    Selection,
    adapter_config,
    is_within,
    layer_index,
    match_full_modules,
    match_parameters,
    match_targets,
    peft_name,
    peft_targets,
    require_supported_settings,
    saved_embeddings,
    suggest_names,
    text_part_name,
    tied_names,
)
from tunewell.methods.targets import (
    add_tied,
    drop_nested,
    expert_notes,
    last_names,
    linear_layers,
    select_layers,
    with_embeddings,
)
from tunewell.models.fp32_modules import use_fp32_weights
from tunewell.models.shared import own_trainable
from tunewell.records.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter_config

_TRAINED = (".lora_A", ".lora_B", ".lora_magnitude_vector")


class Lora(AdapterMethod):
    """LoRA in fp32 on frozen linear layers, saved in PEFT's format."""

    layer_class: ClassVar[type["LoraLinear"]]
    is_dora: ClassVar = False

    def __init__(self, model: PreTrainedModel, notes: list[str], spec: AdapterSpec) -> None:
        super().__init__(model, notes)
        self.spec = spec
        self._initial: dict[str, Tensor] = {}

    @classmethod
    def load_dtype(cls, precision: torch.dtype) -> torch.dtype:
        """Return the precision of the run, because frozen weights need no more."""
        return precision

    @classmethod
    def identity(cls, settings: MethodSettings) -> dict[str, Any]:
        """Return all settings of the adapter. The weights of an earlier adapter are compared, not its path."""
        return settings.model_dump(mode="json", exclude={"kind", "adapter"})

    @classmethod
    def apply(
        cls,
        model: PreTrainedModel,
        settings: MethodSettings,
        *,
        seed: int,
        text_prefix: str = "",
        has_new_tokens: bool = False,
    ) -> Self:
        """Freeze a model and add new low-rank matrices to its linear layers."""
        if has_new_tokens:
            settings = with_embeddings(settings, model)
        selection = select_layers(model, settings)
        notes = expert_notes(model, settings)
        sizes = settings.model_dump(include={"rank", "alpha", "dropout", "rslora"})
        spec = cls._wrap_layers(model, selection, text_prefix, **sizes)
        generator = torch.Generator().manual_seed(seed)
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.reset_parameters(generator)
        method = cls(model, notes, spec)
        method._keep_initial()
        return method

    @classmethod
    def reads(cls, config: Mapping[str, Any]) -> bool:
        """Return True for adapters of PEFT's type LORA without `use_dora`."""
        return config.get("peft_type") == "LORA" and not config.get("use_dora")

    @classmethod
    def load(
        cls, model: PreTrainedModel, folder: Path, *, text_prefix: str = "", settings: MethodSettings | None = None
    ) -> Self:
        """Load an adapter written by PEFT or tunewell into a model. Raise UserError if it is not supported.

        With `settings`, the adapter goes on being trained: they must select its layers.
        """
        config, where = read_adapter_config(folder), str(folder / ADAPTER_WEIGHTS)
        require_supported_settings(config, folder / ADAPTER_CONFIG)
        tensors = {text_part_name(name): tensor for name, tensor in load_file(folder / ADAPTER_WEIGHTS).items()}
        _require_same_vocabulary(model, tensors, where=where)
        _require_tied(model, tensors, is_tied=bool(config.get("ensure_weight_tying")), where=where)
        selection = _saved_selection(model, config, tensors, where=str(folder / ADAPTER_CONFIG))
        if settings is not None:
            _require_same_layers(model, settings, selection, where=str(folder / ADAPTER_CONFIG))
        spec = cls._wrap_layers(
            model,
            selection,
            text_prefix,
            rank=config["r"],
            alpha=config["lora_alpha"],
            dropout=config.get("lora_dropout", 0.0) if settings is None else settings.dropout,
            rslora=bool(config.get("use_rslora")),
        )
        method = cls(model, [], spec)
        method._copy_in(tensors, where=where)
        if settings is not None:
            method._keep_initial()
        return method

    @property
    def has_base(self) -> bool:
        """Whether only low-rank matrices were trained. Disabling the adapter does not restore `modules_to_save`."""
        return not self.spec.modules_to_save

    def files(self, base_model: str | None) -> MethodFiles:
        """Return the adapter in PEFT's format."""
        return MethodFiles({ADAPTER_WEIGHTS: self.tensors()}, {ADAPTER_CONFIG: adapter_config(self.spec, base_model)})

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy the tensors of a checkpoint into the adapter."""
        self._copy_in(tensors[ADAPTER_WEIGHTS], where="checkpoint")

    def reset(self, weights: Mapping[str, Tensor]) -> None:
        """Reset the model to its initial weights and the adapter to its initial matrices."""
        super().reset(weights)
        self._copy_in(self._initial, where="initial adapter")

    def _keep_initial(self) -> None:
        """Copy the adapter before the first step, for `reset`."""
        self._initial = {name: tensor.cpu().clone() for name, tensor in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapter's tensors by PEFT's names. A tied head and embedding are both listed, as in PEFT."""
        prefix = self.spec.text_prefix
        tensors = {
            peft_name(name, prefix): parameter.detach()
            for name, parameter in self.model.named_parameters()
            if name.endswith(_TRAINED) or is_within(name, self.spec.full_modules)
        }
        tied = [peft_name(f"{name}.weight", prefix) for name in tied_names(self.model)]
        for tensor in [tensors[name] for name in tied if name in tensors]:
            for name in tied:
                tensors.setdefault(name, tensor.clone())
        return tensors

    @classmethod
    def _wrap_layers(cls, model: PreTrainedModel, selection: Selection, text_prefix: str, **sizes: Any) -> AdapterSpec:
        targets = peft_targets(model, selection, text_prefix)
        spec = AdapterSpec(**sizes, is_tied=bool(tied_names(model)), is_dora=cls.is_dora, **targets)
        model.requires_grad_(False)
        for name in selection.linears:
            base: Any = model.get_submodule(name)
            layer = cls.layer_class(base, rank=spec.rank, scale=spec.scale, dropout=spec.dropout)
            layer.train(base.training)
            model.set_submodule(name, layer)
        for name in selection.full_modules:
            _train_in_full(model, name)
        return spec

    @torch.no_grad()
    def _copy_in(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Copy tensors by PEFT's names into the adapter. Raise UserError if names or shapes differ."""
        parameters = {peft_name(name): parameter for name, parameter in trainable_parameters(self.model).items()}
        saved = {text_part_name(name): tensor for name, tensor in tensors.items()}
        tied = [peft_name(f"{name}.weight") for name in tied_names(self.model)]
        if tables := [saved[name] for name in tied if name in saved]:
            others = {name: tensor for name, tensor in saved.items() if name not in tied}
            saved = others | {name: tables[0] for name in tied if name in parameters}
        wrong = sorted(parameters.keys() ^ saved.keys())
        wrong += [name for name in parameters.keys() & saved.keys() if parameters[name].shape != saved[name].shape]
        if wrong:
            raise UserError(
                f"the adapter does not fit this model: {len(wrong)} of its tensors are missing, unexpected or of a "
                f"different shape; the first is `{wrong[0]}`",
                where=where,
                fix=suggest_names(parameters, saved),
            )
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def _saved_selection(
    model: PreTrainedModel, config: dict[str, Any], tensors: dict[str, Tensor], *, where: str
) -> Selection:
    """Return the layers that a saved adapter trains."""
    targets, layers = config.get("target_modules") or (), config.get("layers_to_transform")
    linears = tuple(linear_layers(model))
    selected = match_targets(linears, targets)
    layers = None if layers is None else tuple([layers] if isinstance(layers, int) else layers)
    if layers is not None:
        selected = tuple(name for name in selected if layer_index(name) in layers)
    selected += match_parameters(linears, config.get("target_parameters") or (), where)
    full_names = tuple(config.get("modules_to_save") or ())
    names = [name for name, _ in model.named_modules() if name]
    # PEFT also saves the embedding and the head of a resized vocabulary, which its config does not list.
    saved = (*match_full_modules(names, full_names, tensors), *saved_embeddings(model, tensors))
    full_modules = add_tied(model, drop_nested(saved))
    return Selection(
        linears=tuple(dict.fromkeys(name for name in selected if not is_within(name, full_modules))),
        full_modules=full_modules,
        linear_names=tuple(last_names(selected)) if isinstance(targets, str) else tuple(targets),
        layers=layers,
        full_names=full_names,
    )


def _require_same_layers(model: PreTrainedModel, settings: MethodSettings, saved: Selection, *, where: str) -> None:
    """Raise UserError if the settings that were given select other layers than an adapter that goes on training."""
    if not {"targets", "layers", "modules_to_save"} & settings.model_fields_set:
        return
    given = select_layers(model, settings)
    are_linears_set = {"targets", "layers"} & settings.model_fields_set
    wrong = set(given.linears) ^ set(saved.linears) if are_linears_set else set[str]()
    if "modules_to_save" in settings.model_fields_set:
        wrong |= set(given.full_modules) ^ set(saved.full_modules)
    if wrong:
        raise UserError(
            f"the config selects other layers than the adapter: {len(wrong)} differ, for example `{min(wrong)}`",
            where=where,
            fix="remove `method.targets`, `method.layers` and `method.modules_to_save`: the adapter has its own; to "
            "train other layers, merge it first with `tunewell export --to merged`",
        )


def _require_same_vocabulary(model: PreTrainedModel, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Raise UserError if the adapter's embedding or head has more or fewer tokens than the model's."""
    embedding: Any = model.get_input_embeddings()
    num_tokens = embedding.weight.shape[0]
    tables = (embedding, model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if any(module is table for table in tables)]
    for name in names:
        table = tensors.get(peft_name(f"{name}.weight"))
        if table is not None and table.shape[0] != num_tokens:
            raise UserError(
                f"the adapter does not fit this model: its `{name}` has {table.shape[0]:,} tokens, the model has "
                f"{num_tokens:,}",
                where=where,
                fix="tokens were added for the adapter: put the tokenizer with which it was trained into its folder, "
                "or use a base model with as many tokens",
            )


def _require_tied(model: PreTrainedModel, tensors: dict[str, Tensor], *, is_tied: bool, where: str) -> None:
    """Raise UserError if an adapter has different weights for tied embeddings (head and embedding)."""
    tables = [table for name in tied_names(model) if (table := tensors.get(peft_name(f"{name}.weight"))) is not None]
    if not tables or (len(tables) == 1 and is_tied):
        return
    shared: Any = model.get_input_embeddings().weight
    other = tables[1] if len(tables) == 2 else shared.detach().cpu().to(tables[0].dtype)
    if not torch.equal(tables[0], other):
        raise UserError(
            "the adapter has different weights for the head and the embedding, but this model ties the two",
            where=where,
            fix="train it again with PEFT's `ensure_weight_tying: true`, or merge it with PEFT into a model with "
            "`tie_word_embeddings: false` and use that model",
        )


def _train_in_full(model: PreTrainedModel, name: str) -> None:
    """Make a module trainable in fp32. A tied head and embedding stay tied."""
    module = model.get_submodule(name)
    is_tied = name in tied_names(model)
    parts: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()] if is_tied else [module]
    # Read the dtype before the conversion, because converting one tied module converts the shared weight.
    dtype = next(module.parameters()).dtype
    for part in parts:
        if dtype != torch.float32 and not use_fp32_weights(part, dtype):
            raise UserError(
                f"`{name}` cannot be fully fine-tuned in a 16-bit model: only embeddings and linear layers can",
                fix="remove it from `method.modules_to_save`, or set `train.precision: fp32`",
            )
        part.float().requires_grad_(True)
        own_trainable(part)
    if is_tied:
        model.tie_weights()


class LoraLinear(AdapterLayer):
    """A frozen linear layer with low-rank matrices: y = W x + scale * B A x.

    The frozen layer may be any module with `weight`, `bias`, `in_features` and `out_features`. If it has its own
    `forward`, that is called. For a plain `nn.Linear`, and for modules with `is_matrix`, such as quantised ones, the
    sum is computed in one pass.
    """

    def __init__(self, base: nn.Linear, *, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        self.base_layer = base
        self.scale = scale
        self.dropout = dropout
        self._is_plain = getattr(base, "is_matrix", type(base).forward is nn.Linear.forward)
        self._cast: tuple[Tensor, Tensor] | None = None
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, device=device, dtype=torch.float32))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=device, dtype=torch.float32))

    @property
    def in_features(self) -> int:
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        return self.base_layer.out_features

    @property
    def weight(self) -> Tensor:
        """The frozen weight. Some models read its dtype."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initialise as PEFT does: A uniform, as for a linear layer, and B zero, so that the output is unchanged."""
        bound = self.in_features**-0.5
        initial = torch.rand(self.lora_A.shape, generator=generator) * (2 * bound) - bound
        with torch.no_grad():
            self.lora_A.copy_(initial)
            self.lora_B.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_enabled:
            return self.base_layer(x)
        dtype = self.base_layer.weight.dtype if isinstance(self.base_layer, nn.Linear) else x.dtype
        a, b = self._cast or (self.lora_A.to(dtype), self.lora_B.to(dtype))
        has_dropout = self.dropout > 0 and self.training
        if has_dropout or not self._is_plain or torch.compiler.is_compiling():
            adapted = F.dropout(x, self.dropout) if has_dropout else x
            return self.base_layer(x) + F.linear(F.linear(adapted, a) * self.scale, b)
        return _LowRank.apply(x.flatten(0, -2), self.scale, self.base_layer, a, b).unflatten(0, x.shape[:-1])

    def cast(self, dtype: torch.dtype | None) -> None:
        """Cache the matrices in the model's dtype for decoding. None clears the cache."""
        self._cast = None if dtype is None else (self.lora_A.detach().to(dtype), self.lora_B.detach().to(dtype))

    def merged(self) -> nn.Module:
        """Return the frozen layer with the weight W + scale * B A, in fp32 to avoid rounding errors."""
        base = self.base_layer
        if base.weight.dtype != torch.float32:
            raise TypeError(f"merging needs a weight in fp32, not {base.weight.dtype}")
        base.weight.add_(self.lora_B @ self.lora_A, alpha=self.scale)
        return base

    def weight_change(self, rows: slice) -> Tensor:
        """Return rows of scale * B A."""
        a, b = self._factors()
        return b[rows] @ a

    def change_direction(self) -> Tensor | None:
        """Return the first right singular vector of B A."""
        a, b = self._factors()
        across, rest = torch.linalg.qr(a.T)
        _, sizes, vectors = torch.linalg.svd(b @ rest.T, full_matrices=False)
        return across @ vectors[0] if sizes.numel() and float(sizes[0]) else None

    def _factors(self) -> tuple[Tensor, Tensor]:
        return self.lora_A.cpu().double(), self.lora_B.cpu().double() * self.scale


Lora.layer_class = LoraLinear


class _LowRank(torch.autograd.Function):
    """LoRA with the low-rank part added in place, which saves one pass over the output and over the gradient.

    No gradient is computed for W, and W is read from its layer again in the backward pass: a quantised layer computes
    it at each read. The gradient for x is computed only if an earlier layer is trained.

    Shapes: T tokens, K inputs, N outputs, R rank.
    """

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, scale: float, base: nn.Linear, a_RK: Tensor, b_NR: Tensor) -> Tensor:
        xa_TR = x_TK @ a_RK.T
        ctx.save_for_backward(x_TK, xa_TR, a_RK, b_NR)
        ctx.scale, ctx.base = scale, base
        return F.linear(x_TK, base.weight, base.bias).addmm_(xa_TR, b_NR.T, alpha=scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [dy_TN] = grads
        x_TK, xa_TR, a_RK, b_NR = ctx.saved_tensors
        zero = x_TK.new_zeros(())
        dxa_TR = torch.addmm(zero, dy_TN, b_NR, beta=0, alpha=ctx.scale)
        # Transposed, because a product with so few columns is two to five times slower than one with so few rows.
        db_NR = torch.addmm(zero, xa_TR.T, dy_TN, beta=0, alpha=ctx.scale).T
        dx_TK = (dy_TN @ ctx.base.weight).addmm_(dxa_TR, a_RK) if ctx.needs_input_grad[0] else None
        return dx_TK, None, None, dxa_TR.T @ x_TK, db_NR
