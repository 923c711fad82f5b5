"""A small GPT on a CPU, by ddl and by others: python -m benchmarks.gpt_cpu.

The model is `ddl.models.gpt` of 256 tokens with two blocks, 128 wide, without dropout. It trains
with Adam on batches of 32 windows of 64 random tokens, in float32 on one device. All contenders but
the bare loop keep the mean of the loss and the accuracy; ddl's task also reports the perplexity.
The alternatives to ddl are Keras's `fit`; `fit` with all steps of a window in one execution,
without and with XLA; and Orbit's StandardTrainer, whose loop is a tf.while. They train the same
model with Keras's Adam, and read batches in the order of the arrays, while ddl shuffles. The bare
loop is a step in a tf.while with TensorFlow's fused Adam. ddl also runs with XLA
(`--jit_compile=on`). ddl leaves XLA out on CPUs unless it is asked for, so the target for "Keras
fit, tuned" compares ddl without XLA with the faster of both tuned fits. Two further targets compare
like with like: both with XLA, and both without.

About two thirds of the time of all kernels are matrix products, in ddl and in the bare loop alike.
The rest are elementwise operations and sums of the same layers, which XLA joins. ddl's own
operations around the model take little of it, so that no change of ddl's step brings ddl without
XLA to the speed of a fit with XLA.

Each contender has fresh processes, each of which waits while another one computes. A figure is the
median of what the processes found, with the lowest and the highest. A ratio compares a process of
ddl with the process of the other that ran beside it.
"""

import dataclasses
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import ddl
from benchmarks import beside_rivals, command, rivals
from benchmarks.beside_rivals import BARE, DDL, Found
from benchmarks.report import Bar, Report, plot_of
from benchmarks.turns import Turns
from ddl import distribution

TOKENS, POSITIONS, WIDTH, HEADS, BLOCKS = 256, 64, 128, 4, 2
BATCH, BATCHES = 32, 20
RATE = 0.001

FIT, TUNED, ORBIT = "Keras fit", "Keras fit, tuned", "Orbit"
FUNCTIONS = {
    FIT: "fit",
    TUNED: "fit_tuned",
    f"{TUNED}, XLA": "fit_compiled",
    ORBIT: "orbit",
    DDL: "ddl_alone",
    "ddl, XLA": "ddl_compiled",
    BARE: "bare_loop",
}
RIVALS = {FIT: [FIT], TUNED: [TUNED, f"{TUNED}, XLA"], ORBIT: [ORBIT]}
ALIKE = {"ddl, XLA": f"{TUNED}, XLA", DDL: TUNED}
"""By a contender of ddl, the tuned fit with XLA or without, as that contender."""


@dataclasses.dataclass(frozen=True)
class Case:
    """The updates of a window."""

    steps: int


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns windows of tokens and the tokens that follow, both int64 [n, 64]."""
    tokens = np.random.default_rng(0).integers(0, TOKENS, (BATCHES * BATCH, POSITIONS + 1))
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def network() -> keras.Model:
    """Builds the model."""
    sizes = {"width": WIDTH, "heads": HEADS, "blocks": BLOCKS}
    return ddl.models.gpt(TOKENS, POSITIONS, **sizes, dropout=0.0)


def ddl_alone(case: Case, turns: Turns, compiled: str = "off") -> None:
    """Runs ddl."""
    strategy = distribution.build_strategy("one_device")
    with strategy.scope():
        trainer = ddl.Trainer(
            ddl.LanguageModel(network()),
            keras.optimizers.Adam(RATE),
            dict(zip(("token", "next_token"), data(), strict=True)),
            global_batch_size=BATCH,
            jit_compile=compiled,
        )
    trainer.train(case.steps)  # ddl chooses the number of steps per loop
    turns.take(lambda: trainer.train(case.steps), case.steps)


def ddl_compiled(case: Case, turns: Turns) -> None:
    """Runs ddl with XLA."""
    ddl_alone(case, turns, "on")


def fit(case: Case, turns: Turns) -> None:
    """Runs Keras's `fit`."""
    rivals.fit(network(), _adam(), rivals.batches(data(), BATCH), case.steps, turns)


def fit_tuned(case: Case, turns: Turns, compiled: bool = False) -> None:
    """Runs `fit` with all steps of a window in one execution, without XLA."""
    rivals.fit(
        *(network(), _adam(), rivals.batches(data(), BATCH), case.steps, turns),
        steps_per_execution=case.steps,
        jit_compile=compiled,
    )


def fit_compiled(case: Case, turns: Turns) -> None:
    """Runs the same `fit` with XLA."""
    fit_tuned(case, turns, True)


def orbit(case: Case, turns: Turns) -> None:
    """Runs Orbit."""
    rivals.orbit(network(), _adam(), rivals.batches(data(), BATCH), case.steps, turns)


def _adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(RATE)


def bare_loop(case: Case, turns: Turns) -> None:
    """Runs the bare step with TensorFlow's kernel of Adam."""
    model = network()
    variables = [variable.value for variable in model.trainable_variables]
    slots = [(tf.Variable(tf.zeros_like(v)), tf.Variable(tf.zeros_like(v))) for v in variables]

    def update(number: tf.Tensor, tokens: tf.Tensor, following: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(rivals.losses(model, tokens, following)[0])
        powers = [tf.pow(beta, tf.cast(number, tf.float32)) for beta in (0.9, 0.999)]
        for variable, (m, v), gradient in zip(
            variables, slots, tape.gradient(loss, variables), strict=True
        ):
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=powers[0],
                beta2_power=powers[1],
                lr=RATE,
                beta1=0.9,
                beta2=0.999,
                epsilon=1e-7,
                grad=tf.convert_to_tensor(gradient),
            )

    rivals.bare_loop(update, data(), BATCH, case.steps, turns)


def alike(case: str, found: Found) -> list[Bar]:
    """Returns the targets of ddl beside the tuned fit, both with XLA and both without."""
    made = []
    for own, fit in ALIKE.items():
        if (value := found.ratio(fit, own)) is not None:
            kind = "with XLA" if own != DDL else "without XLA"
            made.append(Bar(f"{case}: ddl's speed / {TUNED}'s, both {kind}", value, 1.0))
    return made


def measure(quick: bool) -> Report:
    """Measures all contenders."""
    functions = {name: f"benchmarks.gpt_cpu:{each}" for name, each in FUNCTIONS.items()}
    found = beside_rivals.run(
        functions, Case(3 if quick else 20), 1 if quick else 5, 1 if quick else 5
    )
    name = f"GPT {BATCH}"
    table = beside_rivals.milliseconds("Milliseconds per update", {name: found}, [*FUNCTIONS])
    bars = [] if quick else [*beside_rivals.bars(name, found, RIVALS), *alike(name, found)]
    plots = [plot_of(table, [name], "ms per update")]
    return Report([table], bars, plots, beside_rivals.notes({name: found}))


if __name__ == "__main__":
    command.main(measure)
