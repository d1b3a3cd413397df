"""Tools that put hooks, forwards or wrappers into a model leave it exact over ranks, and so do hooks that look."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.breaks import model_tools_work as work
from tests.pool import pool

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
TIMEOUT = 500.0
EXACT = 1e-5
"""Of float32, a dozen times what a model without hooks is off."""


@pytest.mark.parametrize("name", work.TOOLS)
def test_models_inside_of_known_tools_are_exact(name, tries):
    for rank, found in enumerate(pool(2).run(work.tools, name, timeout=TIMEOUT)):
        assert all(error <= EXACT for error in found), found
        if rank == 0:
            tries("tools that put hooks or forwards into models", 2, 2)
