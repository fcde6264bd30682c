"""What pyproject.toml cannot say: the README for a package index, where links into the repository lead nowhere."""

import re
from pathlib import Path

from setuptools import setup

LINK = r"\[([^\]]*)\]\((?!https?://)[^)]*\)"

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
without_pictures = re.sub(rf"!{LINK}\n*", "", readme)
setup(
    long_description=re.sub(LINK, r"\1", without_pictures),
    long_description_content_type="text/markdown",
)
