import pytest

from ddl.errors import ConfigError
from ddl.learning_rate import scale_learning_rate


@pytest.mark.parametrize(
    ("rule", "expected"), [("linear", 0.4), ("square_root", 0.2), ("none", 0.1)]
)
def test_rules(rule, expected):
    rate = scale_learning_rate(0.1, global_batch_size=256, base_batch_size=64, rule=rule)
    assert rate == pytest.approx(expected)
    assert isinstance(rate, float)


def test_unknown_rule():
    with pytest.raises(ConfigError, match="'cubic'.*linear, square_root, none"):
        scale_learning_rate(0.1, 64, 64, rule="cubic")


@pytest.mark.parametrize("values", [(0.0, 64, 64), (0.1, 0, 64), (0.1, 64, -1)])
def test_refuses_what_is_not_positive(values):
    with pytest.raises(ConfigError, match="more than 0"):
        scale_learning_rate(*values)
