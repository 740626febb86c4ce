"""One browser for all tests of the page that run one after another: its start costs as much as two of them."""

import pytest

from tests.support.page.browser import launched


@pytest.fixture(scope="package")
def browser():
    with launched() as browser:
        yield browser
