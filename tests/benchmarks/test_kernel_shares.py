import numpy as np
import tensorflow as tf

from benchmarks import gpt_cpu, kernel_shares, large_embeddings
from benchmarks.beside_rivals import Found


def test_kernels_of_an_update_are_counted():
    square = tf.ones([64, 64])
    two = tf.function(lambda: tf.matmul(tf.matmul(square, square), square))
    profiled = kernel_shares.Profiled()
    profiled.take(lambda: [two().numpy() for _ in range(3)], 3)
    kinds = [kind for kind in profiled.runs if "MatMul" in kind]
    assert round(sum(profiled.runs[kind] for kind in kinds)) == 2
    assert all(profiled.milliseconds[kind] > 0 for kind in kinds)


def found(**times):
    return Found({name: np.array([each]) for name, each in times.items()}, {})


def test_a_gpt_is_compared_with_fits_that_compile_alike():
    times = {"ddl": 4.0, "ddl, XLA": 2.0, "Keras fit, tuned": 5.0, "Keras fit, tuned, XLA": 3.0}
    bars = gpt_cpu.alike("GPT", found(**times))
    assert [float(bar.value.median) for bar in bars] == [1.5, 1.25]
    assert [bar.what.rpartition(", ")[2] for bar in bars] == ["both with XLA", "both without XLA"]


def test_the_growth_of_the_all_reduce_has_a_target():
    cases = large_embeddings.functions_of_growth(10)
    measured = found(
        **{name: 1.5 if case.rows > 2000 else 1.0 for name, (_, case) in cases.items()}
    )
    report = large_embeddings.reported({}, measured, True)
    assert [bar.what.partition(":")[0] for bar in report.bars][-1] == "ddl, mirrored on 2"
    assert {bar.verdict for bar in report.bars} == {"missed"}
    name, growth = report.tables[1].rows[-1]
    assert name == "a bare loop grows by"
    assert growth.median == 1.5
