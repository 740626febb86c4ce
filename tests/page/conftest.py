"""One browser for all tests of this folder: starting it costs as much as two tests."""

import pytest

from tests.support.page.browser import launch_browser


@pytest.fixture(scope="package")
def browser():
    with launch_browser() as browser:
        yield browser
