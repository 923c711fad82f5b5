"""Cost of ddl's loop on several devices: python -m benchmarks.replicas.

The MLP of `benchmarks.loop_overhead` trains in the same way, mirrored on virtual CPU devices, in
global batches of 64. Keras's `fit` runs one step per execution, since Keras 3.15 fails with more on
several devices. The loop of TensorFlow's tutorial on custom training calls a tf.function of
`strategy.run` for each step.
"""

from benchmarks import harness
from benchmarks.cases import Case
from benchmarks.harness import Options, Report
from benchmarks.loop_overhead import DDL, FIT, FUNCTIONS, ORBIT, TUTORIAL, compared

LIMITS = {FIT: 3.0, TUTORIAL: 1.5, ORBIT: 1.5}
CASES = {Case("MLP", 64, 90, 6, replicas=replicas): LIMITS for replicas in (2, 4)}
LEFT_OUT = {"MLP": FUNCTIONS.keys() - {DDL, *LIMITS}}


def measure(options: Options) -> Report:
    """Measures the MLP on two and on four devices."""
    return compared(CASES, options, LEFT_OUT, "ddl's speed / the others'")


if __name__ == "__main__":
    harness.main(measure)
