"""Tables of documents: what a cell shows."""

from tools.pages.document_tables import escape


def test_a_sign_of_html_is_spelt_except_between_backticks() -> None:
    assert escape("a < b, `c <= d` | `<` or <br>") == "a &lt; b, `c <= d` \\| `<` or &lt;br>"
