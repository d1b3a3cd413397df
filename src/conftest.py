"""Names that docstring examples may use without importing them."""

import pytest

from longspan import layouts, masks


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update({"masks": masks, "layouts": layouts})
    for package in (masks, layouts):
        doctest_namespace.update({name: getattr(package, name) for name in package.__all__})
