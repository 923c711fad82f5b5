"""Q-learning with a replay buffer (Mnih et al. 2015) on catch, a game that the run itself plays.

A ball falls through 8 rows and 5 columns; a paddle in the last row moves left, stays or moves
right. The run plays games between updates and adds each move to the buffer.
"""

from collections.abc import Callable

import gin
import keras
import numpy as np
import tensorflow as tf

import ddl

ROWS, COLUMNS, MOVES = 8, 5, 3
DISCOUNT = 0.95
Policy = Callable[[np.ndarray], np.ndarray]
Rows = dict[str, np.ndarray]


def play(games: int, policy: Policy, random: np.random.Generator) -> tuple[Rows, float]:
    """Plays whole games side by side; returns a row for each move, and the share of games won."""
    ball, paddle = random.integers(COLUMNS, size=(2, games))
    states, moves = [], []
    for row in range(ROWS):
        states.append(np.zeros([games, ROWS, COLUMNS], np.float32))
        states[row][np.arange(games), row, ball] = 1
        states[row][np.arange(games), -1, paddle] += 1
        if row < ROWS - 1:
            moves.append(policy(states[row]))
            paddle = np.clip(paddle + moves[row] - 1, 0, COLUMNS - 1)
    goes_on = np.repeat(np.arange(ROWS - 1) < ROWS - 2, games)
    reward = np.where(goes_on, 0, np.tile(np.where(paddle == ball, 1, -1), ROWS - 1))
    before, after, move = map(np.concatenate, (states[:-1], states[1:], moves))
    rows = {"state": before, "next_state": after, "move": move.astype(np.int64)}
    floats = {"reward": reward.astype(np.float32), "goes_on": goes_on.astype(np.float32)}
    return rows | floats, float(np.mean(paddle == ball))


@gin.register
def random_games(capacity: int) -> ddl.data.ReplayBuffer:
    """A buffer that begins with games of random moves."""
    random = np.random.default_rng(0)
    rows, _ = play(64, lambda states: random.integers(MOVES, size=len(states)), random)
    return ddl.data.ReplayBuffer(capacity, rows)


@gin.register
class Values:
    """Learns the value of each move in a state; `target` follows `model` slowly."""

    def __init__(self, width: int = 64) -> None:
        dense, floatx = keras.layers.Dense, keras.config.floatx()
        layers = [keras.layers.Flatten(), dense(width, "relu"), dense(MOVES, dtype=floatx)]
        self.model = keras.Sequential([keras.Input((ROWS, COLUMNS)), *layers])
        self.target = keras.models.clone_model(self.model)
        self.target.set_weights(self.model.get_weights())

    def per_example(self, features: dict[str, tf.Tensor], training: bool) -> ddl.PerExample:
        """The squared error of the value of the move that was made."""
        values = self.model(features["state"], training=training)
        value = tf.gather(values, features["move"], axis=1, batch_dims=1)
        best = tf.reduce_max(self.target(features["next_state"], training=False), axis=1)
        rest = DISCOUNT * tf.cast(features["goes_on"], best.dtype) * best
        return ddl.PerExample(tf.square(value - tf.cast(features["reward"], best.dtype) - rest))

    def step(self, update: ddl.Update, batch: ddl.StepBatch) -> None:
        """Updates the model, then moves the target."""
        update.minimize(self.per_example, batch)
        update.average(self.target, of=self.model, decay=0.95)

    def best_moves(self, states: np.ndarray) -> np.ndarray:
        """The moves of the highest value."""
        return np.argmax(self.model(states), axis=1)


@gin.register
class Play:
    """A callback that plays games, with some random moves, and adds them to the buffer."""

    def __init__(self, games: int = 8, explores: float = 0.1) -> None:
        self.games, self.explores = games, explores

    def __call__(self, moment: ddl.callbacks.Moment) -> None:
        """Draws from `moment.random`, so a resumed run plays the same games."""
        random, best_moves = moment.random, moment.trainer.task.best_moves

        def policy(states: np.ndarray) -> np.ndarray:
            explores = random.random(len(states)) < self.explores
            any_moves = random.integers(MOVES, size=len(states))
            return np.where(explores, any_moves, best_moves(states))

        moment.data.add(play(self.games, policy, random)[0])


@gin.register
def games_won(moment: ddl.callbacks.Moment) -> dict[str, float]:
    """A callback that logs the share of games won without random moves."""
    return {"won": play(200, moment.trainer.task.best_moves, moment.random)[1]}
