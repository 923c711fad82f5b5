import pytest

# Its asserts show what they compare, as those of tests do.
pytest.register_assert_rewrite("tests.cluster.programs")
