"""Sections of the configuration of `pmm3d train`, with the checks of each one."""

from __future__ import annotations

from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ...errors import Pmm3dError, needs
from ...layout import PIPE, SEQ, ULYSSES
from ...text import names_in_words
from ..compression import Compression
from ..keep import codecs_of
from ..optim import KINDS, Optimizer, Option
from ..transformer.names import mixture_problem
from ..transformer.scaling import RotaryScaling
from .described import WIDEST
from .fields import (
    LARGEST,
    ClassWeights,
    Count,
    Cut,
    Function,
    Hidden,
    LossName,
    Name,
    Place,
    Positive,
    Recompute,
    Section,
    Seed,
    Shape,
    Share,
    Steps,
    Table,
    WarmUp,
    Weights,
    Width,
    default_of,
    of_tokens,
)

with needs("train", "a configuration"):
    from pydantic import AfterValidator, Field, ValidationInfo, create_model, field_validator, model_validator

AUTO = "auto"
OF_TOKENS: dict[str, dict[str, Any]] = {"optimizer": {"clip": 1.0}, "schedule": {"warm_up": AUTO}}
"""Defaults of tokens that are those of no other data. Without them, a transformer often stays at the loss of a network
that ignores its input."""
EPOCHS = 10
"""Default of `epochs` if `steps` is left out too."""


class GridSection(Section):
    """The process grid, and the pipeline on it."""

    shape: Shape = "ddp"
    """ranks along x, y and z; or a family of parallel training, on all ranks; or auto: the grid of all ranks with the
    least predicted time on this machine, or the grid of a family that is at most 2% slower (see `pmm3d plan`,
    `pmm3d tune machine`)"""
    data: Count = 1
    """ranks along data, which hold copies of the weights; ddp and auto choose the number"""
    seq: Count = 1
    """ranks along seq, which share the tokens of a sequence; only for a network of tokens"""
    ulysses: Count = 1
    """ranks along ulysses, which share the tokens of a sequence and exchange heads; choose ranks of one node. With seq,
    attention is distributed in two dimensions"""
    expert: Count | None = None
    """ranks that share the experts of a network (network.experts), which are ranks along z and data: a divisor of the
    ranks along z, or their number times a divisor of data. It divides network.experts. Left out: 1; auto and plans
    choose the number"""
    pipe: Count = 1
    """ranks along pipe. Each holds a stage, which is a part of the layers. shape and data are the grid of a stage"""
    schedule: Table | None = None
    """order of the passes of a pipeline; left out: 1f1b. All orders except dualpipe give the same bits"""
    cut: Cut | None = None
    """number of layers with weights in each stage; cost: stages of about equal flop; left out: stages of about as many
    layers"""
    micro_batches: Count = 1
    """parts of a batch, which pass through the network one after the other. Their gradients are summed. For a pipeline,
    choose a few times pipe, or more. Without a pipeline, activations need the memory of one part"""

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the grid besides shape and data."""
        sizes = (ULYSSES, self.ulysses), (SEQ, self.seq), (PIPE, self.pipe)
        return {name: size for name, size in sizes if size > 1}

    @property
    def staged(self) -> bool:
        """Whether the network is a pipeline, also of one rank."""
        return self.pipe > 1 or self.schedule is not None or self.cut is not None


class DataSection(Section):
    """The data: a file (`file`), files with weights (`mixture`), or an object of your own (`build`)."""

    file: Place | None = None
    """HDF5 file, as `pmm3d convert` writes it, with data sets of samples and targets, with equal numbers of rows; or
    with a data set of tokens. Also for tokens: a .bin file without a header, as nanoGPT writes it, or the .bin or .idx
    file of an indexed data set of Megatron"""
    mixture: Weights | None = None
    """files in place of `file`, with the weight of each one: its share of the rows that are drawn. An epoch has as many
    rows as the training rows of all files together. All rows of a file come before one comes again, over epochs too.
    Held-out rows come once, whatever the weights; needs shuffle = true"""
    build: Function | None = None
    """a function build(), in place of `file`, that returns an object with __len__ and __getitem__, such as a Dataset of
    torch, whose item is a pair (x, y) of numbers, arrays or tensors; for tokens, of `sequence` tokens and the tokens
    that come next"""
    sequence: Annotated[int, Field(ge=2, le=LARGEST)] | None = None
    """for tokens: length of a sequence, which is a row of the data; the targets are the next tokens. Left out: the data
    are samples and targets"""
    vocabulary: Width | None = None
    """for tokens: number of different tokens; left out: that in the HDF5 file, which other data do not contain"""
    token_dtype: Literal["uint16", "uint32"] | None = None
    """for tokens: their type in .bin files without a header (uint16 if left out; uint32 for a vocabulary above
    65536)"""
    inputs: Name = Field(default_factory=lambda given: "tokens" if given.get("sequence") else "x")
    """name of the data set of samples (x if left out), or of tokens (tokens if left out); for HDF5 files"""
    targets: Name | None = Field(default_factory=lambda given: None if given.get("sequence") else "y")
    """name of the data set of targets (y if left out; none for tokens). Integers are classes, floating point numbers
    are values; with a training.loss for values (mse, mae, huber, binary_cross_entropy_with_logits), integers are values
    too"""
    documents: Name | None = None
    """for tokens: name of the data set of the first token of each document ("documents", if `pmm3d convert text` or
    Megatron wrote the file). A token then attends only to tokens of its document. Left out: to all tokens of its
    sequence"""
    validation: Share = 0.1
    """share of the rows that is held out for validation if there is no validation_file; 0.0: no validation; of a
    mixture, the share of each file"""
    validation_file: Place | None = None
    """file for validation, instead of held-out rows"""
    validation_build: Function | None = None
    """a function as `build`, for validation, instead of held-out rows"""
    batch_size: Count = Field(default_factory=lambda given: 16 if given.get("sequence") else 256)
    """rows of a batch, over the whole grid (256 if left out; for tokens 16 sequences). A step trains on one batch"""
    shuffle: bool = True
    """whether the rows have another order in each epoch, by `training.seed`"""
    hold_out: Literal["random", "last"] = Field(
        default_factory=lambda given: "random" if given.get("shuffle", True) and not given.get("sequence") else "last"
    )
    """which rows are held out: random rows, by `training.seed`, or the last rows, for example of a time series; left
    out: last for tokens or if shuffle is false, otherwise random. hold_out = random with shuffle = false: one random
    order, the same in each epoch"""
    groups: Name | None = None
    """name of a data set with a number for each row: rows with the same number are held out together; with hold_out =
    random"""
    classes: Annotated[int, Field(ge=2, le=WIDEST)] | None = None
    """number of classes; left out: the number of class names in the file, or 1 + the largest label. To find it, all
    objects of `build` are read once"""
    standardize: bool | None = None
    """whether the columns of samples, and of targets that are values, are scaled to mean 0 and standard deviation 1 of
    the rows to train on. The scales are part of the network: `predict` returns the units of the targets. Targets of
    binary_cross_entropy_with_logits are not scaled. Left out: true if `pmm3d convert` made the file from a table (CSV,
    Parquet)"""
    prefetch: Annotated[int, Field(ge=1, le=1000)] = 2
    """batches that a thread reads ahead"""

    @property
    def source(self) -> str:
        """Name of the source of the data for training, for messages."""
        if self.mixture is not None:
            return f"the mixture of {names_in_words(map(str, self.mixture))}"
        return str(self.file or self.build)

    @property
    def validation_source(self) -> Path | str | None:
        """Name of the source of other data for validation: a file, or a function; None: held-out rows."""
        return self.validation_file or self.validation_build

    @property
    def files(self) -> list[Path]:
        """Files of the data for training."""
        return [each for each in (self.file, *(self.mixture or ())) if each is not None]

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        given = [name for name in ("file", "mixture", "build") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "the data are missing: set file, mixture or build"
                if not given
                else f"{' and '.join(given)} are given: leave all but one of file, mixture and build out"
            )
        if self.validation_file is not None and self.validation_build is not None:
            raise ValueError("validation_file and validation_build are given: leave one of them out")
        named = self.inputs not in ("x", "tokens") or self.targets not in ("y", None)
        if self.build is not None and self.validation_file is None and named:
            raise ValueError("inputs and targets name data sets of files, which build has not: leave them out")
        if self.mixture is not None and not self.shuffle:
            raise ValueError(
                "mixture draws rows in a random order, by training.seed: leave shuffle = false out, or name one file"
            )
        return self


class NetworkSection(Section):
    """Fully connected layers, a transformer, or a network of your own (`build`, with dtype and library only).
    `network = "model.py:build"`, at the top of the file, is short for `build`."""

    build: Function | None = None
    """a function build(grid, features, outputs) that returns a pmm3d.nn.Module; for tokens, features is 1 (2 with
    data.documents), and outputs is the vocabulary"""
    kind: Literal["mlp", "gpt", "llama"] = "mlp"
    """mlp: fully connected layers; gpt, llama: nn.GPT and nn.Llama, for tokens (data.sequence)"""
    hidden: Hidden = Field(default_factory=lambda given: [512, 512] if given.get("kind") == "mlp" else 256)
    """width of each hidden layer; [] for none (mlp: [512, 512] if left out); features of a token (gpt, llama: 256 if
    left out)"""
    activation: Literal["relu", "gelu", "tanh", "silu", "sigmoid"] | None = default_of(mlp="gelu")
    """function after each hidden layer (mlp: gelu if left out)"""
    norm: bool | None = default_of(mlp=False)
    """whether a LayerNorm precedes each activation (mlp: false if left out)"""
    bias: bool | None = default_of(mlp=True)
    """whether layers have biases (mlp: true if left out)"""
    layers: Width | None = of_tokens(4)
    """number of blocks (gpt, llama: 4 if left out)"""
    heads: Width | None = of_tokens(4)
    """heads of attention, a divisor of hidden unless head_dim is given (gpt, llama: 4 if left out)"""
    kv_heads: Width | None = of_tokens(None)
    """heads of keys and values (gpt, llama: as many as heads if left out)"""
    head_dim: Width | None = of_tokens(None)
    """columns of a head (gpt, llama: hidden / heads if left out)"""
    qkv_bias: bool | None = default_of(llama=False)
    """whether queries, keys and values have biases, as in Qwen 2 (llama: false if left out)"""
    qk_norm: bool | Literal["all"] | None = default_of(llama=False, values='true, false, or "all"')
    """whether each head of queries and keys is normalized, as in Qwen 3; all: all heads together, as in OLMoE (llama:
    false if left out)"""
    mlp: Width | None = of_tokens(None)
    """columns between the layers of a block's MLP (if left out, gpt: 4 times hidden; llama: 8/3 of hidden, up to a
    multiple of 64)"""
    positions: Width | None = of_tokens(None)
    """longest sequence: `pmm3d generate` looks at this number of last tokens (gpt, llama: data.sequence if left out)"""
    vocabulary: Width | None = of_tokens(None)
    """number of tokens of the embedding and of the outputs, at least that of the data: a published network can have
    further ones, which no text has (gpt, llama: the vocabulary of the data if left out)"""
    window: Width | None = of_tokens(None)
    """number of tokens that a token attends to: itself and previous tokens (gpt, llama: all of them if left out)"""
    rotary_base: Positive | None = default_of(llama=10000.0)
    """base of the rotary positions (llama: 10000.0 if left out)"""
    rotary_scaling: dict[str, Any] | None = default_of(
        llama=None, values='a table, such as {rope_type = "linear", factor = 4.0}'
    )
    """scaling of the rotary positions: rope_type (linear, dynamic, yarn or llama3) and its keys, as in nn.Llama (llama:
    none if left out)"""
    eps: Positive | None = of_tokens(1e-5)
    """added to the mean square, or to the variance, in norms (gpt, llama: 1e-05 if left out)"""
    tied: bool | None = default_of(gpt=True, llama=False)
    """whether the last layer's weight is that of the embedding (if left out, gpt: true; llama: false)"""
    experts: Annotated[int, Field(ge=0, le=WIDEST)] | None = of_tokens(0)
    """number of experts of a mixture, in place of the MLP of a block; 0: an MLP (gpt, llama: 0 if left out)"""
    top_k: Width | None = of_tokens(None)
    """number of experts of a token (gpt, llama: 2 if left out)"""
    expert_mlp: Width | None = of_tokens(None)
    """columns between the layers of an expert (gpt, llama: those of mlp if left out)"""
    every: Width | None = of_tokens(1)
    """blocks from mixture to mixture, at most layers: with 2, every second block has experts (gpt, llama: 1 if left
    out)"""
    shared: Annotated[int, Field(ge=0, le=WIDEST)] | None = of_tokens(0)
    """columns between the layers of an expert for all tokens; 0: there is none (gpt, llama: 0 if left out)"""
    shared_gate: bool | None = of_tokens(False)
    """whether the shared expert has a gate, as in Qwen2-MoE (gpt, llama: false if left out)"""
    scores: Literal["softmax", "sigmoid"] | None = of_tokens("softmax")
    """function of the router's logits (gpt, llama: softmax if left out)"""
    normalize: bool | None = of_tokens(None)
    """whether the weights of a token's experts are divided by their sum (gpt, llama: true unless top_k is 1, if left
    out)"""
    capacity: Positive | None = of_tokens(None)
    """in training, largest number of tokens of an expert, as a factor of the mean; tokens above it are dropped.
    Validations and predictions drop none (gpt, llama: no limit if left out)"""
    balance: Annotated[float, Field(ge=0)] | None = of_tokens(None)
    """factor of the loss that balances the experts (gpt, llama: 0.01 if left out; 0 with bias_rate)"""
    z_loss: Annotated[float, Field(ge=0)] | None = of_tokens(0.0)
    """factor of the loss that keeps the router's logits small (gpt, llama: 0.0 if left out)"""
    bias_rate: Annotated[float, Field(ge=0)] | None = of_tokens(0.0)
    """change of a router's biases in each step, which balances the experts without a loss, as in DeepSeek-V3 (gpt,
    llama: 0.0 if left out)"""
    order: Literal["plain", "zigzag", "striped"] | None = of_tokens("plain")
    """order of the tokens of a sequence that ranks along seq share: zigzag gives them equal work (gpt, llama: plain if
    left out)"""
    parallel: Literal["auto", "ring", "ulysses"] | None = of_tokens("auto")
    """how ranks along seq attend to each other's tokens (gpt, llama: auto if left out)"""
    dropout: Share = 0.0
    """share of each hidden layer's outputs that is dropped in training; for a transformer see nn.GPT"""
    recompute: Recompute = "none"
    """which hidden layers, or blocks, keep only their input and are computed again in the backward pass; a number k:
    every k-th one; selective: the attention of each block; bytes, such as "2 GiB": the cheapest choice whose arrays for
    the backward pass take at most these bytes of a rank; true means full, false means none"""
    activations: Literal["replicated", "sharded"] = "replicated"
    """sharded: the axis that a layer sums over also splits the rows of activations (sequence parallelism)"""
    dtype: Literal["float32", "float64"] = "float32"
    """type of weights and batches"""
    library: Name = "numpy"
    """library of weights and batches: numpy, torch, torch:DEVICE or cupy"""
    replay: bool = False
    """whether the network of `build` does the same in each call, so that its steps are replayed (nn.replay)"""

    @property
    def on_host(self) -> bool:
        return self.library in ("numpy", "torch", "torch:cpu")

    @property
    def of_tokens(self) -> bool:
        """Whether the network is a transformer."""
        return self.kind != "mlp"

    @property
    def own_keys(self) -> list[str]:
        """Names of the keys for layers whose values are not the defaults."""
        given, fields = self.model_dump(), type(self).model_fields
        return [
            name
            for name, value in given.items()
            if name not in ("build", "dtype", "library", "replay")
            and value != fields[name].get_default(call_default_factory=True, validated_data=given)
        ]

    @model_validator(mode="after")
    def _replay_fits(self) -> NetworkSection:
        if self.replay and self.build is None:
            raise ValueError(
                "replay is for a network of build: leave it out, because other networks are replayed anyway"
            )
        return self

    @model_validator(mode="after")
    def _mixture_fits(self) -> NetworkSection:
        if self.of_tokens and self.build is None and (problem := mixture_problem(self.model_dump())):
            raise ValueError(problem)
        return self

    @field_validator("rotary_scaling")
    @classmethod
    def _scaling_fits(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        RotaryScaling.of(given, "rotary_scaling", 1, ValueError)
        return given

    @model_validator(mode="after")
    def _hidden_fits(self) -> NetworkSection:
        if self.of_tokens == isinstance(self.hidden, list) and self.build is None:
            raise ValueError(
                f'hidden = {self.hidden} does not fit kind = "{self.kind}", which needs '
                f"{'a number' if self.of_tokens else 'a list of numbers'}"
            )
        return self


def configured(kind: type[Optimizer]) -> dict[str, Any]:
    """Return name -> default in a configuration of the options that an optimizer declares."""
    options = {name: each for name, each in kind.defaults.items() if isinstance(each, Option)}
    return {name: _as_json(each.in_configuration) for name, each in options.items() if each.meaning}


def _rate_of(kind: type[Optimizer]) -> float:
    """Return the default of `lr`: that in Python, or 0.001 if it is needed there."""
    rate = signature(kind).parameters["lr"]
    return 1e-3 if rate.default is rate.empty else float(rate.default)


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


class CommonOptimizerSection(Section):
    """Keys of all optimizers."""

    build: Function | None = None
    """an optimizer of your own: a class of `pmm3d.nn.optim.Optimizer`, in place of `kind`"""
    kind: str | None = Field(
        default_factory=lambda given: None if given.get("build") else "adamw",
        json_schema_extra={"values": ", ".join(f'"{kind}"' for kind in KINDS)},
    )
    """the optimizer (adamw if left out together with build); muon: Muon for hidden matrices, and AdamW for embeddings,
    positions, the last layer, biases and gains; adafactor, sm3: little state, a number for each row and column"""
    options: dict[str, Any] = Field(default={}, json_schema_extra={"values": "a table"})
    """options of the class of `build` by name; the class checks them"""
    lr: Positive = Field(default_factory=lambda given: _rate_of(KINDS.get(given.get("kind") or "", Optimizer)))
    """learning rate, which [schedule] scales (lion: 0.0001, adafactor: 0.01, sm3: 0.1, others: 0.001 if left out)"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """weight decay: weight_decay times the weight is added to the gradient (sgd, adam), or lr times as much is
    subtracted from the weight (all other kinds)"""
    decay_vectors: bool = False
    """whether weight decay includes biases and gains; most recipes decay matrices only"""
    clip: Annotated[float, Field(ge=0)] | None = None
    """largest 2-norm of the gradient of all weights; a longer gradient is scaled down; 0: no limit (for tokens 1.0 if
    left out, otherwise no limit)"""
    shard_over_data: Literal[False, True, "states", "gradients"] = False
    """sharding over data. states or true: of the optimizer's state (ZeRO-1); gradients: also of gradients (ZeRO-2), by
    a reduce-scatter in each of `grid.micro_batches`"""
    states: Literal["", "int8", "bfloat16"] = ""
    """form of the states of matrices with at least 4,096 elements, for sgd, adam, adamw, lion and optimizers with
    `update`: int8 (8 bits, and a scale for each 256 columns of a row) or bfloat16 (rounded up or down at random); "":
    the type of the master weights"""
    groups: list[dict[str, Any]] = Field(
        default=[], json_schema_extra={"values": 'tables, such as [{match = "*.bias", lr = 1e-4}]'}
    )
    """parameters with options of their own, by patterns of their names: match, and lr, weight_decay, decay_vectors or
    options of the optimizer. * matches any text. The first group that matches counts. decay_vectors is true in a
    group with weight_decay, if left out"""

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str | None) -> str | None:
        if kind is not None and kind not in KINDS:
            raise ValueError
        return kind

    @model_validator(mode="after")
    def _one_of_two(self) -> CommonOptimizerSection:
        if self.build and self.kind:
            raise ValueError(f'kind = "{self.kind}" beside build = "{self.build}": leave one of them out')
        if common := [name for name in self.options if name in CommonOptimizerSection.model_fields]:
            raise ValueError(f"options.{common[0]} is a key of its own: write {common[0]} beside build")
        if self.options and not self.build:
            raise ValueError(
                f"options is a table for build, an optimizer of your own: write {', '.join(self.options)} beside kind"
            )
        return self


def _option_fields() -> dict[str, Any]:
    """Return the keys of the options that the optimizers declare, each with a default for each kind."""
    fields = dict[str, Any]()
    for name in dict.fromkeys(name for kind in KINDS.values() for name in configured(kind)):
        options = {kind: each.defaults[name] for kind, each in KINDS.items() if name in configured(each)}
        defaults = {kind: _as_json(option.in_configuration) for kind, option in options.items()}
        meanings = dict[tuple[str, Any], list[str]]()
        for kind, option in options.items():
            meanings.setdefault((option.meaning, str(defaults[kind])), []).append(kind)
        text = "; ".join(
            f"{meaning} ({', '.join(kinds)}: {default} if left out)" for (meaning, default), kinds in meanings.items()
        )
        needed = dict[str, list[str]]()
        for kind, option in options.items():
            needed.setdefault(option.needed, []).append(kind)
        several = [f"{each} ({', '.join(kinds)})" for each, kinds in needed.items()]
        words = "; ".join(several if len(needed) > 1 else needed)
        fields[name] = (
            Annotated[Any, AfterValidator(partial(_checked_option, name, options))],
            default_of(description=text, values=words, **defaults),
        )
    return fields


def _checked_option(name: str, options: dict[str, Option], value: Any, info: ValidationInfo) -> Any:
    option = options.get(info.data.get("kind") or "")
    if option is not None and value is not None and option.problem(name, value):
        raise ValueError
    return value


if TYPE_CHECKING:
    OptimizerSection = CommonOptimizerSection
else:
    OptimizerSection = create_model(
        "OptimizerSection",
        __base__=CommonOptimizerSection,
        __doc__="The optimizer, with the options that it declares, or one of your own (`build`). "
        '`optimizer = "lion.py:Lion"`, at the top of the file, is short for `build`.',
        **_option_fields(),
    )


class ScheduleSection(Section):
    """The learning rate in each step."""

    kind: Literal["constant", "cosine", "linear", "inverse_sqrt", "wsd", "step"] = "cosine"
    """cosine, linear: half a cosine, or a straight line, down to the last step; inverse_sqrt: 1 / sqrt(step); wsd:
    constant, and down by 1 - sqrt in the last steps; step: multiplied by `factor` every `every` steps"""
    warm_up: WarmUp = 0
    """number of first steps, in which the rate rises from 0 to lr; auto: a tenth of the steps of the run, at most 100
    (for tokens auto if left out, otherwise 0)"""
    floor: Annotated[float, Field(ge=0, le=1)] | None = default_of(cosine=0.0, linear=0.0, wsd=0.0)
    """share of lr at the last step (cosine, linear, wsd: 0.0 if left out)"""
    decay: Annotated[float, Field(gt=0, le=1)] | None = default_of(wsd=0.2)
    """share of the steps in which the rate falls (wsd: 0.2 if left out)"""
    timescale: Count | None = default_of(inverse_sqrt=None)
    """number of steps t in sqrt(t / (t + steps after the warm-up)) (inverse_sqrt: warm_up, or 10000, if left out)"""
    every: Count | None = default_of(step=1000)
    """steps between changes of the rate (step: 1000 if left out)"""
    factor: Positive | None = default_of(step=0.1)
    """factor of each change (step: 0.1 if left out)"""


class TrainingSection(Section):
    """Length of the run, loss and metrics, precision, and files."""

    folder: Place = Path("runs/train")
    """folder of this run, for metrics.jsonl, run.json and checkpoints"""
    loss: LossName = "auto"
    """loss to minimize; auto: cross_entropy for classes, mse for values; binary_cross_entropy_with_logits: for
    independent labels, which are columns of targets from 0 to 1; or a function (output, y) of your own, which returns
    the mean over the rows"""
    class_weights: ClassWeights | None = None
    """weight of each class in the loss cross_entropy, in the order of the classes, also in validations; balanced: the
    number of rows to train on, divided by the number of classes with such rows and by the number of rows of the class;
    a class without rows has 1; left out: 1. Each batch must have a label with a weight above 0"""
    label_smoothing: Share = 0.0
    """share of the probability of a label that the loss cross_entropy gives to all classes in equal parts; losses of
    validations have no smoothing"""
    metrics: list[Function] = []
    """functions (output, y) of your own for validations. Each returns a number, or a 1 x 1 tensor, for a batch; its
    figure is the mean over the rows"""
    callbacks: list[Function] = []
    """classes of `pmm3d.nn.training.Callback` of your own, or functions that return such an object. Their methods are
    called before and after each step, and after validations and checkpoints. They can stop the run"""
    steps: Count | None = None
    """number of steps of the run, which ends after `steps` or `epochs`, whichever comes first"""
    epochs: Count | None = Field(default_factory=lambda given: None if given.get("steps") else EPOCHS)
    """passes over the data; left out together with `steps`: 10"""
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"
    """type of the factors of products. tf32: float32, which a GPU rounds to tf32; bfloat16, float16: with float32
    master weights, gradients and sums; float16: also with a scaled loss. A network of `build` must use this
    precision"""
    weights: Place | None = None
    """initial weights: a checkpoint, the folder of a run, a .safetensors file, or a folder of the transformers package.
    A resumed run does not use them"""
    ema: Share | None = None
    """decay of an exponential moving average of the weights, such as 0.999: after each step, an average is ema times
    itself plus 1 - ema times the weight. Validations, and by default the commands that read a run, use the averages;
    left out: no averages"""
    evaluate_every: Steps = 0
    """steps between validations; 0: at the end of each epoch"""
    checkpoint_every: Steps = 0
    """steps between checkpoints; 0: at the end of each epoch"""
    checkpoint_in_background: bool = True
    """whether training continues while a checkpoint is written. Each rank then copies its shards to host memory. The
    run waits for the last checkpoint, and for a checkpoint requested by a signal"""
    keep: Count = 3
    """number of newest checkpoints to keep"""
    patience: Count | None = None
    """number of validations in a row without a smaller loss, after which the run ends early; left out: it does not"""
    best: bool = Field(default_factory=lambda given: given.get("patience") is not None)
    """whether the checkpoint with the least validation loss is kept, in the folder best of training.folder; left out:
    true if patience is set"""
    trace_memory: Steps = 0
    """number of the step whose memory is recorded on rank 0, by array, and predicted; `pmm3d report` draws both. Take
    at least 2, because the first step makes gradients and states; 0: none"""
    log_every: Count = 10
    """steps between lines of metrics.jsonl"""
    seed: Seed = 0
    """seed of the initial weights, of dropout and of the order of the rows; in a network of `build`, of layers without
    a seed"""

    @property
    def of_values(self) -> bool:
        """Whether the loss is for values, by its name."""
        return self.loss not in ("auto", "cross_entropy") and ":" not in self.loss

    @field_validator("metrics")
    @classmethod
    def _have_names(cls, metrics: list[str]) -> list[str]:
        names = [each.rpartition(":")[2] for each in metrics]
        if len(set(names)) < len(names) or {"loss", "accuracy", "r2"} & {*names}:
            raise ValueError(
                "the names of the functions are those of the figures: they must differ, also from loss, accuracy and r2"
            )
        return metrics


class OverlapSection(Section):
    """Communication during computation. No key changes the bits of the weights, unless the BLAS rounds differently if a
    product is cut into more GEMMs."""

    oar: bool = True
    """whether the gradient of a layer's input is summed during the GEMM of the weight gradient"""
    ors: bool = True
    """whether reduce-scatters of weight gradients over z overlap with the rest of the backward pass"""
    oag: bool = True
    """whether the next weight is gathered over z during the computation before it"""
    buckets: bool = True
    """whether gradients are summed over data during the backward pass"""
    bucket_bytes: Count = 2**24
    """bytes of gradients in an all-reduce over data, if buckets is true"""
    reshard_after_forward: bool | None = None
    """whether gathered weights are freed after the forward pass; left out: if memory is short"""
    shared_weights: bool = False
    """whether ranks along z on one node share one copy of each gathered weight; in host memory only"""
    decomposed: bool | None = None
    """whether rows of sharded activations are multiplied when they arrive from each rank; left out: if they come from
    other nodes"""
    regather_inputs: bool = False
    """whether layers keep only their shard of sharded activations, and gather it again in the backward pass"""


class MemorySection(Section):
    """Less memory and smaller messages: docs/memory.md. All of it is off by default."""

    loss_tiles: Steps = 0
    """most rows (tokens) of a tile of the last layer and the loss on a rank, so that logits of all rows never exist; 0:
    off"""
    mlp_tiles: Steps = 0
    """most rows (tokens) of a tile of a block's MLP on a rank; 0: off"""
    keep: dict[str, str] = Field(
        default={}, json_schema_extra={"values": 'a table, such as {"linear.input" = "bfloat16"}'}
    )
    """arrays that are saved for the backward pass in 16 or 8 bits, or as bits: name, in which * matches any text, and
    bfloat16, float16, int8, int8:BLOCK, or bits (of relu.output)"""
    offload: list[Literal["activations", "states"]] = Field(default=[])
    """arrays that are moved to the store until they are needed: those saved for the backward pass, and states of the
    optimizer"""
    store: str = ""
    """folder for the files of offload, on a fast disk; left out: memory of the host, for arrays on a device"""
    gradients: str = ""
    """codec of the sums of gradients over data: bfloat16, float16, int8, powersgd:RANK or topk:SHARE"""
    weights: str = ""
    """codec of the gathers of weights over z: bfloat16, float16, int8 or int8:BLOCK"""
    stages: str = ""
    """codec of the messages between stages of a pipeline: bfloat16, float16, int8 or int8:BLOCK"""

    @property
    def compression(self) -> Compression:
        """Codecs of messages."""
        return Compression(self.gradients, self.weights, self.stages)

    @field_validator("keep", "gradients", "weights", "stages")
    @classmethod
    def _is_known(cls, given: Any, info: ValidationInfo) -> Any:
        try:
            _ = codecs_of(given) if info.field_name == "keep" else Compression(**{str(info.field_name): given})
        except Pmm3dError as error:
            raise ValueError(str(error)) from None
        return given

    @model_validator(mode="after")
    def _is_used(self) -> MemorySection:
        if self.store and not self.offload:
            raise ValueError("store is the folder of offload, which is empty: set offload, or leave store out")
        return self
