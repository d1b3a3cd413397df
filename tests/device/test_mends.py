"""Defects that the stand-in device showed stay mended: with a mend undone, what showed the defect shows it again.

One more was mended: docs/gpu.md on the default backends (test_device.py).
"""

import pytest

from tests.device import mends
from tests.device.ranks import ranks


@pytest.mark.share(8)
@pytest.mark.parametrize("name", mends.MENDS)
def test_a_mend_that_is_undone_is_seen(name):
    pool = ranks(2, mends.MENDS[name].form)
    assert not any(pool.run(mends.found, name, False)), "it is mended"
    assert any(pool.run(mends.found, name, True))
