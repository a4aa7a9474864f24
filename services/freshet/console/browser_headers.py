"""What the console tells browsers with every answer. Names and pages are checked as on every HTTP port
(`freshet.http.browser_checks`), and a change needs a token that no browser sends by itself.
"""

from __future__ import annotations

from freshet.http.messages import Headers

__all__ = ["HEADERS", "SITE_SETTINGS"]

SITE_SETTINGS = ("FRESHET_COMMON_HOSTS", "FRESHET_CONSOLE_HOST")
"""Settings that add a name by which the console may be asked."""

HEADERS: Headers = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
"""With every answer: nothing from elsewhere is loaded, run, framed or told where one came from."""
