"""For tools that do not read pyproject.toml, where everything is."""

from setuptools import setup

setup()
