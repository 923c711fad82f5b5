"""The configs of two runs: whether their steps can be compared. Imports no TensorFlow."""

from collections.abc import Iterator, Sequence

from ddl.errors import ConfigError
from ddl.replay.folder import Run
from ddl.report.bindings import differences

_LIKE = {
    "global_batch_size": "global batch size",
    "num_examples": "number of training examples",
    "batches_per_update": "number of batches per update",
}
_MOST = 20


def check_comparable(a: Run, b: Run) -> None:
    """Raises ConfigError if a step of one run is not a step of the other."""
    for name, what in _LIKE.items():
        values = [_newest(run).get(name) for run in (a, b)]
        if None not in values and values[0] != values[1]:
            raise ConfigError(
                f"The {what} must be the same in both runs, since the steps mean something else "
                f"otherwise, got {values[0]} in {a.path} and {values[1]} in {b.path}. Compare runs "
                "of the same data and batch size."
            )
    if not (a.reached and b.reached):
        run = b if a.reached else a
        raise ConfigError(
            f"{run.path} has made no update: it has neither metrics nor checkpoints. Train first."
        )


def config_lines(a: Run, b: Run) -> Iterator[str]:
    """Yields a line for each binding and each kind of device that differs."""
    changes = differences([a.bindings, b.bindings])
    for change in changes[:_MOST]:
        values = ["(not bound)" if value is None else value for value in change.values]
        yield f"config: {change.name} = {values[0]:.200} → {values[1]:.200}"
    if len(changes) > _MOST:
        yield f"config: {len(changes) - _MOST} further bindings differ (ddl show {a.path} {b.path})"
    devices = [_devices(run) for run in (a, b)]
    if devices[0] != devices[1]:
        yield (
            f"devices: {devices[0]} → {devices[1]}. Sums in another order round differently, so "
            "that the first difference may be rounding."
        )


def _newest(run: Run) -> dict[str, object]:
    return dict(run.checkpoints[max(run.checkpoints)]) if run.checkpoints else {}


def _devices(run: Run) -> str:
    known = _newest(run)
    texts: Sequence[object] = [known.get(name) for name in ("strategy", "replicas", "device")]
    known_texts = [str(text) for text in texts if text is not None]
    if known.get("shard_optimizer_state") is True:
        with_sums = known.get("shard_gradients") is True
        known_texts.append(f"with slots{' and gradients' if with_sums else ''} in shares")
    if known.get("jit_compile") not in (None, "auto"):
        known_texts.append(f"--jit_compile={known['jit_compile']}")
    return " ".join(known_texts) or "unknown"
