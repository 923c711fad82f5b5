"""The verbs of a task's own step; each divides its work among replicas and microbatches."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.errors import ConfigError, check_takes, did_you_mean, place_of
from ddl.microbatch import Microbatch
from ddl.optimizers.weight_average import move_towards, weights_of
from ddl.step.clipping import Variables, multiply
from ddl.step.engine import Engine
from ddl.step.global_gradient import Reduced
from ddl.step.gradients import Gradients, trainable_variables
from ddl.step.loss import Loss, OfExample, OfExamples, Values
from ddl.step.moving_statistics import statistics_of
from ddl.step.overflow import KeptValues
from ddl.step.state import StepBatch, TrainingState
from ddl.tasks.parts import layers_of
from ddl.tasks.task import LossFunction

Results = dict[str, tf.Tensor]
"""Figures of an update by name (`Update.results`)."""

FINITE = "finite"
"""Name of the result that tells whether no gradient of the update overflowed."""


class Update:
    """One update, made of the verbs that a task's `step(update, batch)` calls.

        class Sam:  # Foret et al. 2021, "Sharpness-aware minimization"
            def step(self, update, batch):
                up = update.gradients(self.per_example, batch)
                with update.moved(self.model, up * (self.rho / up.norm())):
                    sharp = update.gradients(self.per_example, batch, same_draws_as=up)
                update.apply(sharp)

    A step is written as if one device held the global batch. It runs in cross-replica context, in
    a graph; its losses run in replica context. If a gradient overflows, weights, slots, statistics,
    averages and the task's own variables keep their values.

    Attributes:
      results: The results of the verbs so far, by name: FINITE, bool [], and sums over the verbs.
        "sums/LOSS" are the metric sums of a loss outside of `moved`, "moved/LOSS" those within it;
        "norms/OPTIMIZER" are sum and number of the gradient norms, float64 [2].
      taken: Number of batches taken of each source, by its name.
      functions: Function and source of each loss, mean and sum, by its name.
      apply_calls: Optimizer's name and variables of each `apply`, and whether it is in a branch.
      averaged: Variables that `average` moves.
    """

    def __init__(
        self, task: Any, engine: Engine, state: TrainingState, batches: Mapping[str, Batch]
    ):
        """Keeps the arguments; `ddl.Trainer` makes the update.

        Args:
          task: The task, with a `step`.
          engine: Computes for the verbs; in a rehearsal (`ddl.step.planning`) nothing.
          state: The state before the update.
          batches: The batches of each source, by its name, all with the same counter.
        """
        self._task, self._where = task, f"{type(task).__name__}.step"
        self._engine, self._plan, self._gradient = engine, engine.plan, engine.gradient
        self._strategy, self._state = engine.gradient.strategy, state
        self.results: Results = {}
        self.taken = dict.fromkeys(batches, 1)
        self.apply_calls: list[tuple[str, Variables, bool]] = []
        self.averaged: list[tf.Variable] = []
        self.functions: dict[str, tuple[Any, str]] = {}
        self._passes, self._moved, self._in_branch = 0, set[int](), False
        self._context: Any = _context()
        self._batches = {name: StepBatch(name, 0, one, state) for name, one in batches.items()}
        seed = next(iter(engine.gradient.pipelines.values())).seed
        counter = next(iter(batches.values())).counter
        self._microbatch = Microbatch(
            seed=seed, training=True, counter=counter, first_row=0, rows=0, pass_number=-1
        )

    def run(self) -> None:
        """Runs the task's step.

        Raises:
          ConfigError: If the step misuses a verb, branches on a tensor in Python, makes
            variables or returns a value; names the line.
        """

        def refuse(create: Callable[..., Any], **arguments: Any) -> Any:
            raise ConfigError(
                f"{self._where} must not make variables, since it runs many times. Make them in "
                "the task's constructor."
            )

        try:
            with self._microbatch.forward(), tf.variable_creator_scope(refuse):
                if self._task.step(self, self._batches.get("", self._batches)) is not None:
                    raise ConfigError(f"{self._where} must return None. Its losses return metrics.")
        except Exception as error:
            message = str(error) if isinstance(error, ConfigError) else self._meaning(error)
            if message is None:
                raise
            place = place_of(error)
            text = message if place is None else f"{message}\n{place.note}"
            raise ConfigError(text) from (error.__cause__ if message == str(error) else error)
        self._context = None
        if self._moved:
            raise ConfigError("update.moved must be used in a `with` statement.")

    @property
    def calls(self) -> Any:
        """What the step has called, to be compared with another trace."""
        applied = [(name, *map(id, variables)) for name, variables, _ in self.apply_calls]
        return list(self.functions), self.taken, applied

    @property
    def step(self) -> tf.Tensor:
        """Number of updates made before this one, int64 []."""
        return self._state.step

    def gradients(
        self,
        loss: LossFunction,
        batch: StepBatch,
        model: Any = None,
        *,
        name: str | None = None,
        same_draws_as: Gradients | None = None,
        moves_statistics: bool = True,
        each: OfExample | None = None,
    ) -> Gradients:
        """Computes the gradient of a loss over the global batch.

        The loss is computed on all microbatches and replicas and summed once. The logged values of
        a loss are means over its calls outside of `moved`, or over all calls if there are none.

        Args:
          loss: A method of the task with the arguments and the result of `per_example`.
          batch: The batch that the step was given.
          model: Model, layer or variables to differentiate by, or a list; None: the task's `model`.
          name: Name of the loss in figures; None: the name of the method.
          same_draws_as: Gradients whose passes drew the numbers to draw again; None: new numbers.
          moves_statistics: Whether this forward pass moves statistics such as moving averages.
          each: Changes the gradient of each example before they are added up, such as to clip it
            (DP-SGD): takes and returns a list with a tensor for each variable on which the loss
            depends. It computes for one example, and `tf.vectorized_map` runs it on all. The
            gradients of all examples of a replica are in memory at once.

        Returns:
          The gradients, the same on all replicas: divided by the global weight, unscaled, not
          clipped. Each has shape and dtype of its variable; 0 if the loss does not depend on it.

        Raises:
          ConfigError: If the loss is not a function of the task, or returns something else than a
            `ddl.PerExample`; with `each`, if the model normalizes over the batch.
        """
        if each is not None:
            check_takes("`each` of update.gradients", each, ("gradients",))
        batch, statistics = self._pass_over("gradients", batch, same_draws_as), list[tf.Variable]()
        if not moves_statistics:
            statistics = statistics_of(layers_of(self._task), self._strategy)
        kept = KeptValues(statistics, self._strategy)
        variables, reduced = self._reduced(loss, batch, model, name, each, in_shares=False)
        kept.restore()
        values = reduced.values
        if reduced.factor is not None:
            values = self._strategy.run(multiply, args=(values, reduced.factor))
        return Gradients(self._strategy, variables, values, batch.pass_number)

    def _reduced(
        self, function: Any, batch: StepBatch, model: Any, name: Any, each: Any, in_shares: bool
    ) -> tuple[list[keras.Variable], Reduced]:
        """Returns variables and reduced gradient of a loss; adds its metric sums to the results."""
        variables = self._variables("gradients", model)
        loss, name = self._loss(self._plan.losses, function, name, batch)
        loss = dataclasses.replace(loss, each=each)
        reduced = self._gradient(loss, variables, batch, in_shares=in_shares)
        self._add(FINITE, reduced.finite)
        self._add(f"{'moved' if self._moved else 'sums'}/{name}", reduced.sums)
        return variables, reduced

    def apply(self, gradients: Gradients, optimizer: str | None = None) -> None:
        """Applies gradients: adds regularization, clips, and lets an optimizer update.

        Args:
          gradients: Gradients of the global batch.
          optimizer: Name of the optimizer, where the Trainer has several.

        Raises:
          ConfigError: If there is no optimizer of that name.
        """
        self._check("apply")
        _check_gradients("update.apply", gradients)
        self._add(FINITE, self._gradient.finite(gradients.of_replicas))
        self._apply(gradients.variables, gradients.of_replicas, None, optimizer)

    def minimize(
        self,
        loss: LossFunction,
        batch: StepBatch,
        model: Any = None,
        *,
        optimizer: str | None = None,
        name: str | None = None,
    ) -> None:
        """Computes the gradient of a loss and applies it: `gradients`, then `apply`.

        Args:
          loss: As in `gradients`.
          batch: As in `gradients`.
          model: As in `gradients`.
          optimizer: As in `apply`.
          name: As in `gradients`.

        Raises:
          ConfigError: As `gradients` and `apply`.
        """
        # A gradient that nothing else reads may stay in shares and without its factor.
        batch = self._pass_over("gradients", batch)
        variables, reduced = self._reduced(loss, batch, model, name, None, in_shares=True)
        self._apply(variables, reduced.values, reduced.factor, optimizer)

    def _apply(self, variables: Variables, values: Any, factor: Any, optimizer: str | None) -> None:
        self._check_not_moved("apply", [v.value for v in variables])
        name = self._name_of_optimizer(optimizer)
        self.apply_calls.append((name, variables, self._in_branch))
        norm = self._engine.apply(name, variables, values, factor)
        self._add(f"norms/{name}", tf.stack([norm, tf.ones_like(norm)]))

    def moved(self, model: Any, by: Gradients) -> AbstractContextManager[None]:
        """Adds `by` to the weights within the `with` block; restores them bit for bit after it.

        Args:
          model: Model, layer or variables to move, or a list; None: the task's `model`.
          by: Values to add, such as a multiple of gradients.

        Returns:
          A context manager, for a `with` statement.

        Raises:
          ConfigError: If `by` holds nothing for a variable, or the weights are moved already.
        """
        self._check("moved")
        _check_gradients("update.moved", by)
        by = by.of(self._variables("moved", model))
        variables = [variable.value for variable in by.variables]
        self._check_not_moved("moved", variables)
        kept, change = KeptValues(variables, self._strategy), self._strategy.extended.update
        for variable, value in zip(variables, by.of_replicas, strict=True):
            change(variable, lambda copy, x: copy.assign_add(x), args=(value,))
        ids = {id(variable) for variable in variables}
        self._moved |= ids
        end: Any = ExitStack()
        end.callback(self._moved.difference_update, ids)
        end.callback(kept.restore)
        return end

    def average(self, target: Any, *, of: Any, decay: float | tf.Tensor) -> None:
        """Moves weights towards others: target ← target + (1 - decay)·(of - target).

        As the mean teacher of Tarvainen and Valpola 2017, once for each call, on all replicas.

        Args:
          target: Model or layer to move, with its moving statistics, or list of such or variables.
          of: Model, layer or list of variables of the same shapes.
          decay: Share of the target that stays; a number, or a scalar tensor.

        Raises:
          ConfigError: If the shapes differ, or the decay is out of range.
        """
        self._check("average")
        targets, sources = weights_of("target", target), weights_of("of", of)
        shapes = [[tuple(v.shape) for v in variables] for variables in (targets, sources)]
        if shapes[0] != shapes[1] or {id(v) for v in targets} & {id(v) for v in sources}:
            raise ConfigError(
                "update.average: target and `of` must have weights of the same shapes, none of "
                f"them shared, got {shapes[0]!s:.80} and {shapes[1]!s:.80}."
            )
        if isinstance(decay, int | float) and not 0 <= decay < 1:
            raise ConfigError(f"update.average: decay must be from 0 to below 1, got {decay}.")
        self._check_not_moved("average", targets)
        self.averaged += targets
        # TensorFlow would read a Python number as float32.
        exact = np.float64(decay) if isinstance(decay, int | float) else decay
        share = 1 - tf.cast(exact, tf.float64)
        for variable, source in zip(targets, sources, strict=True):
            self._strategy.extended.update(variable, move_towards, args=(source, share))

    def mean(self, function: OfExamples, batch: StepBatch, *, name: str | None = None) -> tf.Tensor:
        """Computes the mean of a function of the examples over the global batch.

            self.center.assign(update.mean(self.outputs_of_teacher, batch))

        Args:
          function: A method of the task with the arguments of a loss, which returns a float tensor
            [batch, …]. The row of an example must depend only on that example.
          batch: The batch that the step was given.
          name: Name of the function; None: its own name.

        Returns:
          Tensor […] of the function's dtype, weighted by the weights of the data; 0 without weight.

        Raises:
          ConfigError: If the function returns something else, or depends on other examples.
        """
        return self._summed("mean", function, batch, name)

    def sum(self, function: OfExamples, batch: StepBatch, *, name: str | None = None) -> tf.Tensor:
        """Computes the sum of a function of the examples over the global batch.

        The sum of ones is the sum of the weights: the number of examples, if the data have none.

        Args:
          function: As in `mean`.
          batch: As in `mean`.
          name: As in `mean`.

        Returns:
          Tensor […] of the function's dtype, or float32 for half precision: values times weights.

        Raises:
          ConfigError: As `mean`.
        """
        return self._summed("sum", function, batch, name)

    def _summed(
        self, verb: str, function: OfExamples, batch: StepBatch, name: str | None
    ) -> tf.Tensor:
        batch = self._pass_over(verb, batch)
        check_takes(f"The function of update.{verb}", function, ("features",), ("training",))
        loss, _ = self._loss(self._plan.means, Values(function), name, batch)
        total, weight = self._gradient.sums(loss, batch)
        like = loss.form.entry
        value = tf.math.divide_no_nan(total, weight) if verb == "mean" else total
        holds = verb == "mean" or like.dtype.size > 2  # half precision holds no sum
        value = tf.cast(value, like.dtype if holds else tf.float32)
        self._add(FINITE, self._gradient.finite([value]))
        return tf.reshape(value, like.shape)

    def next(self, batch: StepBatch) -> StepBatch:
        """Returns a further batch of the source of a batch, of the same size.

            for _ in range(5):
                update.minimize(self.criticizes, update.next(batch), self.critic)

        Each update reads the same number of batches, so an epoch has fewer updates.

        Raises:
          ConfigError: Within `when`, where the number of batches would depend on a tensor.
        """
        self._check("next", batch)
        if self._in_branch:
            raise ConfigError("update.next must read as many batches each time: not in `when`.")
        self.taken[batch.source] += 1
        return dataclasses.replace(batch, number=self.taken[batch.source] - 1)

    def when(self, condition: tf.Tensor, function: Callable[[], Any]) -> None:
        """Calls a function, which may call this update, if a condition holds.

            update.when(update.step % 5 == 0, lambda: update.minimize(self.fools, batch, …))

        Args:
          condition: bool [], the same on all replicas, such as a function of `step` or of a norm.
          function: Takes no arguments; its result is not used.

        Raises:
          ConfigError: If the condition is no bool scalar, or the function takes arguments.
        """
        self._check("when")
        holds = tf.convert_to_tensor(condition)
        if holds.dtype != tf.bool or holds.shape.rank != 0:
            raise ConfigError(f"update.when takes a bool scalar, got {condition!r:.80}.")
        check_takes("The function of update.when", function, ())
        of_branch: list[Results] = []

        def called() -> Results:
            earlier = self._context, self._in_branch, self.results
            self._context, self._in_branch, self.results = _context(), True, {}
            # In the branch's graph; it continues to count the draws.
            with dataclasses.replace(self._microbatch).forward():
                function()
            of_branch.append(self.results)
            self._context, self._in_branch, self.results = earlier
            return of_branch[0]

        def skipped() -> Results:  # traced after `called`
            like = of_branch[0].items()
            return {n: (tf.ones if n == FINITE else tf.zeros)(x.shape, x.dtype) for n, x in like}

        for name, value in tf.cond(holds, called, skipped).items():
            self._add(name, value)

    def _add(self, name: str, value: tf.Tensor | None) -> None:
        """Adds a result to that of its name; None adds nothing."""
        known = self.results.get(name)
        if known is not None and value is not None:
            value = known & value if name == FINITE else known + value
        if value is not None:
            self.results[name] = value

    def _pass_over(self, verb: str, batch: StepBatch, like: Gradients | None = None) -> StepBatch:
        """Returns a batch for a pass that draws new numbers, or those of earlier gradients."""
        self._check(verb, batch)
        self._passes += 1
        number = self._passes - 1 if like is None else getattr(like, "pass_number", None)
        if number is None:
            raise ConfigError("same_draws_as must be a result of update.gradients itself.")
        return dataclasses.replace(batch, pass_number=number)

    def _check(self, verb: str, batch: Any = None) -> None:
        """Raises ConfigError where a verb cannot be called, or for what is no batch."""
        if _context() != self._context:
            raise ConfigError(
                f"update.{verb} must be called in the step itself: not after it, in a loss, or in "
                "a tf.cond, tf.while_loop or tf.function. Use update.when, or a Python `for`."
            )
        if verb in ("next", "gradients", "mean", "sum") and not isinstance(batch, StepBatch):
            raise ConfigError(
                f"update.{verb} takes a batch that the step was given, after the function, got "
                f"{batch!r:.80}. With several sources, pass one of them."
            )

    def _check_not_moved(self, verb: str, variables: Sequence[tf.Variable]) -> None:
        if any(id(variable) in self._moved for variable in variables):
            raise ConfigError(f"Call update.{verb} after update.moved, which restores the weights.")

    def _loss(
        self, known: dict[str, Loss], function: Any, name: str | None, batch: StepBatch
    ) -> tuple[Any, str]:
        """Returns the loss of a function in this trace, and its name: the given or its own."""
        name = getattr(function, "__name__", None) if name is None else name
        if not callable(function) or not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(
                f"{self._where}: a loss must be a function with a name of letters, digits and "
                f'underscores, got {function!r:.80}. Pass a method of the task, or name="…".'
            )
        check_takes(f"{self._where}: {name}", function, ("features",), ("training",))
        given = function, batch.source
        if self.functions.setdefault(name, given) != given:
            raise ConfigError(
                f"{self._where}: two losses have the name {name!r}, or one has it for two sources. "
                'Pass name="…" for one of them.'
            )
        return self._plan.loss(known, function, name, batch.source), name

    def _variables(self, verb: str, model: Any) -> list[keras.Variable]:
        """Returns the trainable variables of a model; None means the task's own."""
        given = getattr(self._task, "model", None) if model is None else model
        return trainable_variables(given, f"`model` of update.{verb}")

    def _name_of_optimizer(self, name: str | None) -> str:
        """Returns the name of an optimizer; None means the only one."""
        names = list(self._plan.groups)
        name = names[0] if name is None and len(names) == 1 else name
        if name is None or name not in names:
            raise ConfigError(
                f"{self._where}: there is no optimizer {name!r}; Trainer.optimizer has "
                f"{', '.join(names)}.{did_you_mean(str(name), names)} Pass one of its names."
            )
        return name

    def _meaning(self, error: Exception) -> str | None:
        """Returns the message for a misuse that Python or TensorFlow reports, or None."""
        text, asked = str(error), getattr(error, "obj", None)
        in_python = isinstance(error, tf.errors.OperatorNotAllowedInGraphError)
        if in_python or "'SymbolicTensor'" in text or "symbolic tf.Tensor" in text:
            return (
                f"{self._where} uses a tensor where Python needs a value, such as in `if`. Use "
                "update.when(condition, function), or a Python `for` over a range."
            )
        if "is out of scope" in text:
            return f"{self._where} uses a value of update.when outside of it. Use it within it."
        if isinstance(error, TypeError) and text.startswith(("Update.", "Gradients.")):
            return f"{self._where}: {text}."
        ours = asked is self._task or isinstance(asked, Update | Gradients | StepBatch)
        if isinstance(error, AttributeError) and ours:
            return f"{text}.{did_you_mean(str(error.name), dir(asked))}"
        return None


def _context() -> Any:
    """Returns graph and replica context, in which a verb is called."""
    return tf.compat.v1.get_default_graph(), tf.distribute.get_replica_context()


def _check_gradients(where: str, given: Any) -> None:
    if not isinstance(given, Gradients):
        raise ConfigError(f"{where} takes the result of update.gradients, got {given!r:.80}.")
