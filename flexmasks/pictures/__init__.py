"""Pictures: a mask or score comes in, a drawing goes out.

The drawing is text, SVG, HTML or a matplotlib figure.
"""

from __future__ import annotations

from typing import Any

from flexmasks.spec.values import Modifier


def _html_of(value: Any) -> str:
    from flexmasks.pictures.show import html_of  # imported at the first use

    return html_of(value)


Modifier.to_html = staticmethod(_html_of)
