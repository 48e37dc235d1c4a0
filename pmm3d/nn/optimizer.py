"""Base class of optimizers, with parameter groups. State is sharded like the weights, or also over data (ZeRO)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf, prod
from typing import Any
from weakref import WeakSet

from ..action import UPDATE
from ..arrays import Array, parallel_rows
from ..comm import Pending
from ..errors import Pmm3dError
from ..product import DistMatrix
from .compute import computing
from .gradient_norm import check_clip, check_finite, clipping, non_finite, norm_of
from .low_states import CODING, LEAST, LOW_STATES, StateMatrix, check_states, store
from .module import Module
from .offloaded_states import OffloadedStates
from .optimizer_options import COMMON, Option, check_known, check_parameters
from .optimizer_state import LIKE_WEIGHT, Part, Shard, StateForm, note_memory, replica_axis, state_name
from .parameter import Parameter
from .store import Store, agree_on_stores

Group = dict[str, Any]
"""Options of a group by name ("lr", "weight_decay", ...), and its parameters as "params"."""
Options = Mapping[str, Any]
"""Options of a parameter in a step: the options of its group, and "step", the number of its updates with this one."""
Parameters = Iterable[Parameter] | Iterable[Mapping[str, Any]]
Batch = list[tuple[Part, Options]]
"""Parameters that are updated together, with their options."""
Change = tuple[Part, Options, Array, Iterable[Array]]
"""A parameter, its options, its gradient as a flat array, and its states."""
Slice = tuple[Array, Array, Sequence[Array], Options]
"""Arguments of `Optimizer.update`."""
SHARDED = "states", "gradients"
"""Arrays that can be sharded over data: states (ZeRO-1) and gradients (ZeRO-2)."""


class Optimizer:
    """Base class of optimizers. A subclass names its options and states, and defines `update` or `update_shard`.

    Parameters
    ----------
    parameters : iterable
        Parameters of one network; or groups, each a dict with "params" and its own options, as in torch.
    lr : float
        Learning rate.
    weight_decay : float
        Weight decay; see the subclass. Default: 0.
    decay_vectors : bool
        Whether weight decay includes vectors (biases, gains), as in torch. Default: True.
    shard_over_data : bool or str
        "states" or True (ZeRO-1): each rank along data keeps the state of its part of each parameter, and changes this
        part. "gradients" (ZeRO-2): each rank also keeps its part of the gradients only. Default: False.
    states : str
        Form of the states of matrices with at least 4,096 elements. "int8": 8 bits, and a scale for each 256 columns of
        a row. "bfloat16": 16 bits, rounded up or down at random. "" (default): the type of the master weight.
    **options
        Further options that the class names in `defaults`.

    Attributes
    ----------
    groups : list of dict
        "params" and all options of each group. All ranks may change options between steps, and add groups (see
        `add_param_group`).
    parameters : list of Parameter
        The parameters of all groups.
    steps : int
        Number of steps.

    Raises
    ------
    Pmm3dError
        On every rank, for unknown options, for values out of range, and for a parameter that occurs twice or is on
        another grid. By the next call, for groups that lack a parameter which they had. With `states`, for an optimizer
        with `update_shard` or with states of other types, and for Muon.
    DTypeError
        With `states`, for parameters whose master weight is not float32.

    Notes
    -----
    With ZeRO-1, gradients are reduce-scattered over data once a step, and weights are all-gathered after the update.
    The bytes are those of an all-reduce, the state takes 1/Gdata of the memory, and the bits are the same. With ZeRO-2
    each backward pass reduce-scatters, also in `no_sync`: m times for m micro-batches. Gradients take 1/Gdata of the
    memory, and weights equal those of ZeRO-1 up to rounding. If a parameter has several optimizers, the last one that
    was made determines the sharding.

    A 16-bit parameter has a master weight, float32 by default. The optimizer changes the master weight, and rounds it
    to the parameter. Values that are written to the parameter between steps replace the master weight. After a write to
    a numpy or cupy array, increase `version` of the parameter, because such writes are not detected.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.nn import optim
    >>> class Momentum(optim.Optimizer):
    ...     state_names, defaults = ("velocity",), {"momentum": 0.9}
    ...     def update(self, weight, gradient, state, options):
    ...         state[0] *= options["momentum"]
    ...         state[0] += gradient
    ...         weight -= options["lr"] * state[0]
    >>> with Grid(shape="ddp") as grid:
    ...     net = nn.Linear(grid, 3, 2)
    ...     opt = Momentum([{"params": [net.weight]}, {"params": [net.bias], "momentum": 0.5}], lr=0.1)
    ...     opt.lr, opt.groups[1]["momentum"], list(opt.matrices(net.named_parameters()))
    (0.1, 0.5, ['optimizer/weight/velocity', 'optimizer/bias/velocity'])
    """

    defaults: Mapping[str, Any] = {}
    """Name -> default, or `Option`, of the options other than lr, weight_decay and decay_vectors."""
    state_names: Sequence[str] = ()
    """Names of the states. A checkpoint with other names is refused."""
    passes: float = 1
    """How often `update` reads and writes its arrays, for predicted times."""
    needs_real: bool = False
    """Whether complex parameters are refused."""

    def __init__(
        self,
        parameters: Parameters,
        lr: float,
        *,
        weight_decay: float = 0.0,
        decay_vectors: bool = True,
        shard_over_data: bool | str = False,
        states: str = "",
        **options: Any,
    ):
        given, base = list[Any](parameters), Optimizer
        if (type(self).update, type(self).update_shard) == (base.update, base.update_shard):
            raise Pmm3dError(f"{type(self).__name__} has no method update: define it, or update_shard")
        self._sharded, self._low, self._parameters = shard_over_data, states, list[Parameter]()
        self._options_given = {
            **{name: each.default if isinstance(each, Option) else each for name, each in self.defaults.items()},
            "lr": lr,
            "weight_decay": weight_decay,
            "decay_vectors": decay_vectors,
            **options,
        }
        check_known(type(self).__name__, self._options_given, [*COMMON, *self.defaults, "shard_over_data", "states"])
        grouped = given and all(isinstance(each, Mapping) for each in given)
        self.groups: list[Group] = [dict(each) for each in given] if grouped else [{"params": given}]
        self.steps, self.steps_without_grad, self._noted = 0, Counter[Parameter](), 0
        self._state: dict[Parameter, dict[str, Array]] = {}
        self._parts: dict[Parameter, Part] = {}
        self._offloaded: OffloadedStates | None = None
        if shard_over_data not in (False, True, *SHARDED):
            raise Pmm3dError(
                f'{type(self).__name__}: shard_over_data is False, "states" (or True) or "gradients"; got '
                f"{shard_over_data!r}"
            )
        self._take_groups()
        self.grid.attached.setdefault(note_memory, WeakSet()).add(self)

    @property
    def lr(self) -> float:
        """Learning rate of the first group."""
        return self.groups[0]["lr"]

    @property
    def parameters(self) -> list[Parameter]:
        """Parameters of all groups."""
        if [id(each) for group in self.groups for each in group["params"]] != [*map(id, self._parameters)]:
            self._take_groups()
        return self._parameters

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Add a group of parameters, such as layers that learn from now on. Collective.

        Parameters
        ----------
        group : mapping
            "params", and options as in the constructor. Default of the options: those of the constructor.

        Raises
        ------
        Pmm3dError
            On every rank, and before anything is changed, as in the constructor.

        Notes
        -----
        The first step with a gradient makes the state of a parameter, as for all other groups. `groups.append` has the
        same effect.
        """
        self.groups.append(dict(group))
        try:
            with self.grid.collective_call("add_param_group", *(name for name in group if name != "params")):
                self._take_groups()
        except Exception:
            self.groups.pop()
            raise

    def _take_groups(self) -> None:
        """Check the groups, fill in their options, and prepare the parameters that are new."""
        for group in self.groups:
            check_known(f"{type(self).__name__}, in a group of parameters", group, ["params", *COMMON, *self.defaults])
            group.update({**self._options_given, **group, "params": list(group.get("params", ()))})
            self.check_options(group)
        parameters, had = [each for group in self.groups for each in group["params"]], set(self._parameters)
        self._check_parameters(parameters)
        self._parameters = parameters
        self._parts.clear()
        self.grid, self.parent_grid = parameters[0].grid, parameters[0].parent_grid
        self.shard_over_data = bool(self._sharded) and self.grid.data.size > 1
        self._has_experts = any(replica_axis(each.layout) != "data" for each in parameters)
        for parameter in parameters:
            if parameter not in had:
                self.steps_without_grad[parameter], buffer = self.steps, parameter.grad_buffer
                buffer.split_over = replica_axis(parameter.layout) if self._splits(parameter) else ""
                buffer.scattered = self._splits(parameter) and self._sharded == "gradients"

    def _check_parameters(self, parameters: Sequence[Parameter]) -> None:
        name = type(self).__name__
        check_parameters(name, parameters, self._parameters, self.needs_real)
        check_states(name, self._low, self._updates_elements(), parameters)

    def check_options(self, options: Options) -> None:
        """Raise Pmm3dError for options of a group that are out of range."""
        declared = {**COMMON, **self.defaults}.items()
        texts = [each.problem(name, options[name]) for name, each in declared if isinstance(each, Option)]
        if problems := [*filter(None, texts)]:
            raise Pmm3dError(f"{type(self).__name__}: {'; '.join(problems)}")

    def step(self, *, check: bool = False, factor: float = 1.0, keep_gradients: bool = False) -> None:
        """Change every parameter that has a gradient, then drop the gradients. Collective.

        Parameters
        ----------
        check : bool
            Whether to compute the gradient's norm first, with one number from each rank. If False (default), a gradient
            that is not finite changes the weights, as in torch.
        factor : float
            Factor of the gradients, the same on all ranks, for clipping or for the scale of a loss. Default: 1.
        keep_gradients : bool
            Whether `Parameter.grad` is readable after the step, as in torch: the gradient that the step used, summed
            and times the factor. A later backward pass adds to it, unless you call `zero_grad`; `train_step` drops it.
            With a `LossScale`, call `zero_grad` before the next backward pass. Default: False.

        Raises
        ------
        NonFiniteGradientError
            With `check`, on every rank, if the norm is infinite or NaN. No weight is changed.
        Pmm3dError
            On every rank, for gradients that are not summed (see `no_sync`), and for a factor that is not positive.

        Notes
        -----
        The gradients are work memory: a step overwrites their arrays. With `keep_gradients`, it overwrites copies of
        them, of one parameter at a time or of a few small ones. If `update` raised an error, call `zero_grad`.
        """
        if not 0 < factor < inf:
            raise Pmm3dError(f"step: the factor is a positive number; got {factor!r}")
        if check:
            check_finite(self.gradient_norm())
        offloaded = self._offloaded
        if Store in self.grid.attached:
            agree_on_stores(self.grid, None if offloaded is None else offloaded.store)
        filled, gathers = self._with_gradient(), list[Pending]()
        self.steps += 1
        batches = self._batches()
        if offloaded is not None:
            try:
                offloaded.begin(batches)
            except BaseException:
                self.steps -= 1
                raise
        if len(filled) < len(self._parameters):
            self.steps_without_grad.update({*self._parameters}.difference(filled))
        with self.grid.ledger.phase("optimizer"):
            for number, batch in enumerate(batches):
                try:
                    if offloaded is None:
                        self._change(batch, factor, keep_gradients)
                    else:
                        offloaded.change(number, factor, keep_gradients)
                finally:  # after an error, too: some parameters have changed
                    for part, _ in batch:
                        part.parameter.version += 1
                gathers += [part.all_gather() for part, _ in batch if part.is_split]
            for gather in gathers:
                gather.wait()
        for parameter in filled:
            if parameter.grad_buffer.feedback is not None or parameter.grad_buffer.apart:
                parameter.grad_buffer.use()
            if parameter.master is not None:
                parameter._note_rounded()
        if len(self._state) != self._noted:
            self._noted = len(self._state)
            note_memory(self.grid)
        if keep_gradients:
            self._scale_gradients(factor)
            for parameter in filled:
                parameter.grad_buffer.scales = {1.0}
        else:
            self.zero_grad()
        if offloaded is not None:
            offloaded.end()

    def offload(self, store: Store) -> None:
        """Keep the states in a store between steps, from the first step on.

        Parameters
        ----------
        store : Store
            A store of the grid of the network, also that of `nn.offload`.

        Raises
        ------
        Pmm3dError
            If there are states already, for states of 8 or 16 bits, or if the store is of another grid. In a step, on
            every rank and before a weight is changed, if the store has no room or lost states.

        Notes
        -----
        A step gets and puts each state once. While it updates some parameters, the states of the next ones are got, and
        those of the last ones are put. They are in up to three buffers of equal sizes: the states of the largest
        parameter or of a batch of small ones, up to 32 MiB if the optimizer updates each element by itself. Bits do not
        change. `matrices` returns arrays over the memory of the store, so a checkpoint needs no further memory, unless
        it is written in the background. A file holds master weights, too; memory of the host does not.

        Source: ZeRO-Offload (Ren et al. 2021); ZeRO-Infinity (Rajbhandari et al. 2021).

        Examples
        --------
        >>> import tempfile
        >>> from pmm3d import DistMatrix, Grid, nn
        >>> from pmm3d.nn import optim
        >>> with tempfile.TemporaryDirectory() as folder, Grid(shape="ddp") as grid:
        ...     net, x = nn.Linear(grid, 8, 8, bias=False), DistMatrix.random(grid, (8, 8), dtype="float32")
        ...     opt = optim.AdamW(net.parameters(), lr=0.1)
        ...     opt.offload(store := nn.Store(grid, folder))
        ...     for _ in range(2):
        ...         nn.mse(net(x), x).backward()
        ...         opt.step()
        ...     store.written, store.read
        (1024, 512)
        """
        name = type(self).__name__
        if self._state:
            raise Pmm3dError(
                f"{name}.offload: there are states already. Call it before the first step, and before a "
                "checkpoint is loaded"
            )
        if store.grid is not self.grid:
            raise Pmm3dError(f"{name}.offload: the store is on another Grid: make it on that of the network")
        if self._low:
            raise Pmm3dError(
                f"{name}.offload: a store holds states of the type of the weights: leave states = {self._low!r} out, "
                "or leave the states in memory"
            )
        self._offloaded = OffloadedStates(self, store)

    @classmethod
    def _updates_elements(cls) -> bool:
        """Whether each element of a weight is updated with its own states only."""
        return (cls._change, cls.update_shard) == (Optimizer._change, Optimizer.update_shard)

    def _held(self) -> dict[Parameter, Collection[Array]]:
        if self._offloaded is not None:
            buffers = [each for of in self._offloaded.buffers.values() for each in of]
            return {each: [] if place else buffers for place, each in enumerate(self.parameters)}
        return {each: self._state.get(each, {}).values() for each in self.parameters}

    def _skip(self) -> None:
        """Count a step that changes no parameter, and drop the gradients."""
        if Store in self.grid.attached:
            agree_on_stores(self.grid, None)
        self._with_gradient()
        self.steps += 1
        self.steps_without_grad.update(self.parameters)
        self.zero_grad()

    def _part(self, parameter: Parameter) -> Part:
        """Return the part of a parameter that this rank updates."""
        part = self._parts.get(parameter)
        if part is None or part.spec is not parameter.spec:
            part = self._parts[parameter] = Part(parameter, self._splits(parameter))
            part.is_low = bool(self._low) and not part.is_vector and prod(parameter.shape) >= LEAST
        return part

    def _batches(self) -> list[Batch]:
        """Parameters with a gradient, with their options in the current step. A batch has options that differ in "step"
        only, and few elements. All ranks make the same batches. A parameter whose parts are gathered afterwards is a
        batch of its own."""
        batches, before, size = list[Batch](), None, 0
        for group in self.groups:
            known = dict[tuple[bool, int], Options]()
            for parameter in group["params"]:
                buffer = parameter.grad_buffer
                if buffer.layout is None:
                    continue
                part = self._parts.get(parameter)
                if part is None or part.spec is not parameter.spec:
                    part = self._part(parameter)
                kind = part.is_vector, self.steps_without_grad.get(parameter, 0)
                if (options := known.get(kind)) is None:
                    options = known[kind] = self._options_of(part, group)
                alike = id(group), options["weight_decay"], part.library, part.types.master
                most = buffer.largest // part.gradient_bytes
                if part.is_split or alike != before or size + most > part.slice_size:
                    batches.append([])
                    before, size = None if part.is_split else alike, 0
                batches[-1].append((part, options))
                size += most
        return batches

    def _options(self) -> dict[Parameter, Options]:
        """Options of each parameter in the current step."""
        return {each: self._options_of(self._part(each), group) for group in self.groups for each in group["params"]}

    def _options_of(self, part: Part, group: Group) -> Options:
        """Return the options of a parameter of this group in the current step. They are equal for all vectors of the
        group with a gradient in equally many steps, and for all other such parameters."""
        return {
            **group,
            "weight_decay": 0.0 if part.is_vector and not group["decay_vectors"] else group["weight_decay"],
            "step": self.steps - self.steps_without_grad.get(part.parameter, 0),
        }

    def zero_grad(self) -> None:
        """Drop the gradients. `step` does so, too."""
        parameters = self.parameters
        parameters[0].tape.parallel.gradients.forget(*[each.grad_buffer for each in parameters])

    def update(self, weight: Array, gradient: Array, state: Sequence[Array], options: Options) -> None:
        """Change a slice of a weight and of its state arrays, in place.

        Parameters
        ----------
        weight, gradient, state : Array
            Flat numpy, torch or cupy arrays of one length and type. The gradient may be changed. The weight of a 16-bit
            parameter is its master weight.
        options : mapping
            Options of the parameter's group, and "step", the number of its changes including this one. "weight_decay"
            is 0 for a vector if `decay_vectors` is False.

        Notes
        -----
        Several threads may call it at once for different slices, so it must change these arrays only. Functions of
        their library are in `array_api_compat.array_namespace(weight)`.
        """

    def update_shard(self, shard: Shard) -> None:
        """Change the weight and the states of a shard, in place.

        Define it in place of `update` for sums over ranks, or for states that have another shape than the weight.

        Parameters
        ----------
        shard : Shard
            Rows and columns of a parameter: weight, gradient, states by name, options, and sums over ranks.

        Notes
        -----
        All ranks call it for the same parameters in the same order. Predicted times and memory come from a call with
        arrays without data, so it must not decide by values.
        """

    def state_forms(self, parameter: Parameter, options: Options) -> Mapping[str, StateForm]:
        """Name -> form of the states of a parameter. Default: each of `state_names` has the form of the weight.

        Parameters
        ----------
        parameter : Parameter
            For its `shape` and `is_vector`.
        options : mapping
            Options of its group.
        """
        return dict.fromkeys(self.state_names, LIKE_WEIGHT)

    @classmethod
    def groups_of(cls, network: Module) -> Parameters:
        """Parameters, or groups of them, for an optimizer of a configuration."""
        return network.parameters()

    def _local_norm_squared(self) -> float:
        """This rank's part of the square of the 2-norm of all gradients. The sum over all ranks is the square."""
        return float(sum(self._own_squares().values(), 0.0))

    def _own_squares(self) -> dict[Parameter, Any]:
        """Terms of `_local_norm_squared` for each parameter with a gradient. On a device, they stay on the device."""
        squares = dict[Parameter, Any]()
        for parameter in self._with_gradient():
            part = self._parts.get(parameter)
            if part is None or part.spec is not parameter.spec:
                part = self._part(parameter)
            own, counts = part.gradient(), parameter.in_norm and part.is_first
            squares[parameter] = part.library.square_sum(own) if counts else 0.0
        return squares

    def _non_finite(self) -> str:
        """Description of the gradients of the whole network that are not finite. Collective."""
        return non_finite(self, self._own_squares())

    def gradient_norm(self) -> float:
        """2-norm of all gradients of the whole network. Collective: one number from each rank."""
        return norm_of(self.parent_grid, self._local_norm_squared())

    def clip(self, norm: float) -> float:
        """Scale all gradients so that their 2-norm is at most `norm`. Collective: one number from each rank.

        Parameters
        ----------
        norm : float
            Largest 2-norm.

        Returns
        -------
        float
            The 2-norm before scaling.

        Raises
        ------
        NonFiniteGradientError
            On every rank, if the norm is infinite or NaN.
        """
        check_clip(norm)
        before = self.gradient_norm()
        factor = clipping(before, norm)
        self._scale_gradients(factor)
        return before

    def _scale_gradients(self, factor: float) -> None:
        for parameter in self._with_gradient() if factor != 1 else ():
            with self.grid.ledger.passing("clip"):
                parameter.grad_buffer.local[...] *= factor

    def _with_gradient(self) -> list[Parameter]:
        """Wait for the sums of gradients. Return the parameters with a gradient. Raises Pmm3dError for missing sums."""
        parameters = self.parameters
        for parameter in parameters:
            buffer = parameter.grad_buffer
            if buffer.failed or buffer.is_open or buffer.queues:
                raise Pmm3dError(
                    f"{type(self).__name__}: the gradient of {parameter.name or 'a parameter'} is not "
                    "summed over the ranks. The last backward pass before a step must be outside of "
                    "no_sync, and queues of defer_weights must be drained. After a backward pass that "
                    "ended with an error, call zero_grad()"
                )
        for parameter in parameters:
            if parameter.grad_buffer.pending is not None:
                parameter.grad_buffer.wait()
        return [parameter for parameter in parameters if parameter.grad_buffer.layout is not None]

    def _change(self, batch: Batch, factor: float, keep_gradients: bool) -> None:
        """Update parameters with their gradients times a factor."""
        if type(self).update_shard is not Optimizer.update_shard:
            for part, options in batch:
                self._apply_to_shard(part, options, factor, keep_gradients)
            return
        changes, work = list[Change](), 0
        for part, options in batch:
            gradient, states = part.gradient(copied=keep_gradients), self._states(part, options)
            changes.append((part, options, gradient, states.values()))
            work += part.work
        with computing(self.grid, "update", work):
            self._apply(changes, factor)

    def _apply_to_shard(self, part: Part, options: Options, factor: float, keep_gradients: bool) -> None:
        """Call `update_shard`. Round a master weight to the parameter's type."""
        parameter, library, types, shape = part.parameter, part.library, part.types, part.shape
        gradient, states, low = part.gradient(copied=keep_gradients), self._states(part, options), part.stored()
        weight = part.weight().reshape(shape)
        with self.grid.ledger.passing(self._pass_name):
            if library.dtype(gradient) != types.master:
                gradient = library.astype(gradient, types.master)
            if factor != 1:
                gradient *= factor
            shard = Shard(weight, gradient.reshape(shape), {**states}, options, parameter, part.layout)
            self.update_shard(shard)
            before = {"weight": shard.weight, **shard.state}
            if replaced := [
                name for name, each in {"weight": weight, **states}.items() if before.get(name) is not each
            ]:
                raise Pmm3dError(
                    f"{type(self).__name__}.update_shard: the array {replaced[0]} was replaced, so its change would be "
                    "lost: change it in place, as in array[...] = values"
                )
            if part.has_master:
                low[...] = weight.reshape(-1)

    @property
    def _pass_name(self) -> str:
        """Name of the passes over memory in a dry run."""
        return UPDATE + type(self).__name__.lower()

    def _apply(self, changes: Sequence[Change], factor: float) -> None:
        """Call `update` on this rank's parts of parameters. Round master weights to the parameters' types."""
        slices, rounded = list[Slice](), list[tuple[Array, Array]]()
        for part, options, gradient, states in changes:
            low, state = part.stored(), list[Array]()
            for array in states:
                if part.is_low:
                    array.close()
                state.append(array if part.is_low else array.reshape(-1))
            weight = part.weight() if part.has_master else low
            if not part.library.has_data:
                changed = [weight, *state, *([gradient] * (factor != 1))]
                nbytes = sum(array.nbytes for array in (gradient, *changed, *changed, *[low] * part.has_master))
                coding = CODING * part.size * len(state) if part.is_low else 0
                assert self.grid.dry_run is not None
                self.grid.dry_run.passed(self._pass_name, round(self.passes * nbytes) + coding)
            elif part.size > part.slice_size or (part.is_low and part.size):
                self._apply_in_slices(part, (weight, gradient, state, options), low, factor)
            elif part.size:
                if factor != 1 or part.casts:
                    gradient = _scaled(part, gradient, factor)
                slices.append((weight, gradient, state, options))
                if part.has_master:
                    rounded.append((low, weight))
        try:
            if slices:
                self._update_slices(slices)
        finally:
            for low, weight in rounded:
                low[...] = weight

    def _apply_in_slices(self, part: Part, arrays: Slice, low: Array, factor: float) -> None:
        """Call `update` on slices of this rank's part of a parameter."""
        weight, gradient, state, options = arrays
        low_states = state if part.is_low else ()
        cols = part.shape[1] if low_states else 1

        def change(rows: slice) -> None:
            chunk = slice(rows.start * cols, rows.stop * cols)
            own = _scaled(part, gradient[chunk], factor)
            held = [each.read(rows).reshape(-1) for each in low_states] or [array[chunk] for array in state]
            self._update_slices([(weight[chunk], own, held, options)])
            if low_states:
                store(low_states, rows, held, options["step"])
            if part.has_master:
                low[chunk] = weight[chunk]

        parallel_rows(part.library, change, part.shape if low_states else (part.size,), part.slice_size)

    def _update_slices(self, slices: Sequence[Slice]) -> None:
        """Call `update` on arrays of several parameters, whose options differ in "step" only. Several threads may call
        it at once."""
        for each in slices:
            self.update(*each)

    def _states(self, part: Part, options: Options) -> dict[str, Array]:
        """This rank's parts of the states of a parameter, in the order of `state_forms`. Initially zero. The dict must
        not be changed."""
        parameter = part.parameter
        held, forms = self._state.setdefault(parameter, {}), self.state_forms(parameter, options)
        if self._offloaded is not None:
            return self._offloaded.arrays(part, forms)
        if not forms.keys() <= held.keys():  # also if an option such as momentum was switched on later
            self._check_forms(forms)
            for name, (shape, dtype) in part.forms_here(forms).items():
                if name in held:
                    continue
                parameter.has_state = True
                if part.is_low:
                    with self.grid.ledger.holding("state"):
                        held[name] = LOW_STATES[self._low](part, len(held))
                else:
                    with self.grid.ledger.holding("state"):
                        held[name] = parameter.library.empty(shape, dtype)
                    held[name][...] = 0
        return held if [*held] == [*forms] else {name: held[name] for name in forms}

    def _check_forms(self, forms: Mapping[str, StateForm]) -> None:
        """Raise Pmm3dError if `state_forms` does not fit the class."""
        name = type(self).__name__
        if isinstance(self.state_names, str):
            raise Pmm3dError(f'{name}: state_names is one text: write a tuple, ("{self.state_names}",)')
        if unknown := [each for each in forms if each not in self.state_names]:
            raise Pmm3dError(f"{name}: state_forms has {', '.join(unknown)}: add the name to state_names")
        if self._low and (typed := [each for each, form in forms.items() if form.dtype]):
            raise Pmm3dError(f"{name}: the state {typed[0]} has a type of its own: leave states = {self._low!r} out")
        if type(self).update_shard is Optimizer.update_shard:
            for each, form in forms.items():
                if (form.rows, form.cols) != (None, None):
                    raise Pmm3dError(f"{name}: the state {each} has not the shape of the weight: define update_shard")

    def matrices(
        self, paths: Mapping[str, Parameter] | None = None, stored: Collection[str] = ()
    ) -> dict[str, DistMatrix]:
        """States by name, such as "optimizer/0.weight/momentum", for a checkpoint.

        Parameters
        ----------
        paths : mapping or None
            `named_parameters()` of the network. Default: each parameter's `name`.
        stored : collection of str
            Names in a checkpoint that is to be loaded.

        Returns
        -------
        dict
            Name -> DistMatrix. Master weights are included under the names of their parameters. Left out: frozen
            parameters that have a state neither here nor in `stored`.

        Raises
        ------
        Pmm3dError
            Without `paths`, if two parameters have the same name.
        """
        matrices, options, parts = dict[str, DistMatrix](), self._options(), dict[str, Part]()
        for path, parameter in self._by_path(paths).items():
            part, forms = self._part(parameter), self.state_forms(parameter, options[parameter])
            if parameter.requires_grad or parameter in self._state or _is_stored(path, forms, stored):
                parts[path] = part
        views: Mapping[Parameter, dict[str, Array]] = {}
        if self._offloaded is not None:
            views = self._offloaded.prepare([(part, options[part.parameter]) for part in parts.values()], viewed=True)
        for path, part in parts.items():
            parameter, forms = part.parameter, self.state_forms(part.parameter, options[part.parameter])
            matrix = StateMatrix.of if part.is_low else DistMatrix
            states = views[parameter] if parameter in views else self._states(part, options[parameter])
            for name, array in states.items():
                shape, form = forms[name].shape(parameter.shape), forms[name].layout(part.layout)
                matrices[state_name(path, name)] = matrix(self.grid, array, shape, form)
            if parameter.precision.has_master:
                matrices[path] = parameter._master_in(part.layout)
        return matrices

    def state(self, paths: Mapping[str, Parameter] | None = None) -> dict[str, Any]:
        """Further facts for a checkpoint, for JSON.

        Parameters
        ----------
        paths
            As in `matrices`.
        """
        named = self._by_path(paths) if self.steps_without_grad else {}
        missed = {path: times for path, each in named.items() if (times := self.steps_without_grad[each])}
        return {"kind": type(self).__name__, "steps": self.steps, "states": list(self.state_names), "missed": missed}

    def load_state(
        self, state: dict[str, Any], paths: Mapping[str, Parameter] | None = None, stored: Collection[str] | None = None
    ) -> None:
        """Load facts of a checkpoint. Options such as `lr` do not change.

        Parameters
        ----------
        paths, stored
            As in `matrices`.

        Raises
        ------
        Pmm3dError
            For the state of another kind of optimizer.
        """
        if state["kind"] != type(self).__name__:
            raise Pmm3dError(f"the state is of {state['kind']}; this optimizer is {type(self).__name__}")
        self.steps, missed, options = state["steps"], state.get("missed", {}), self._options()
        without = Counter[Parameter]()
        for path, each in (self._by_path(paths) if missed or stored is not None else {}).items():
            begins = stored is not None and not _is_stored(path, self.state_forms(each, options[each]), stored)
            without[each] = self.steps if begins else missed.get(path, 0)
        self.steps_without_grad = +without

    def _by_path(self, paths: Mapping[str, Parameter] | None) -> dict[str, Parameter]:
        """Parameters of this optimizer by path, or by name. Raises Pmm3dError for two parameters with one name."""
        if paths is not None:
            own = set(self.parameters)
            return {path: parameter for path, parameter in paths.items() if parameter in own}
        named = dict[str, Parameter]()
        for parameter in self.parameters:
            if named.setdefault(parameter.name, parameter) is not parameter:
                raise Pmm3dError(
                    f"{type(self).__name__}: two parameters are named {parameter.name!r}, so a checkpoint "
                    "would contain the state of one of them. Make both networks attributes of one Module, "
                    "and pass its named_parameters() to this call"
                )
        return named

    def _splits(self, parameter: Parameter) -> bool:
        """Whether each rank along data updates only a part of the parameter."""
        axis = replica_axis(parameter.layout)
        return self.shard_over_data and getattr(self.grid.shape, axis) > 1 and axis not in parameter.layout.splitting


def _scaled(part: Part, gradient: Array, factor: float) -> Array:
    """A gradient times a factor, in the type of the master weight. The gradient may be overwritten."""
    if part.casts and part.library.dtype(gradient) != part.types.master:
        gradient = part.library.astype(gradient, part.types.master)
    if factor != 1:
        gradient *= factor
    return gradient


def _is_stored(path: str, names: Collection[str], stored: Collection[str]) -> bool:
    """Whether a checkpoint contains the state of a parameter, or if the optimizer has no states, the parameter."""
    return any(state_name(path, name) in stored for name in names) if names else path in stored
