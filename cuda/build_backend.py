"""setuptools' build backend, which asks for NVRTC where CUDA is to be built."""

import nvrtc
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def get_requires_for_build_wheel(config_settings=None):
    found = build_meta.get_requires_for_build_wheel(config_settings)
    return [*found, *nvrtc.requirements()]


def get_requires_for_build_editable(config_settings=None):
    found = build_meta.get_requires_for_build_editable(config_settings)
    return [*found, *nvrtc.requirements()]


def get_requires_for_build_sdist(config_settings=None):
    found = build_meta.get_requires_for_build_sdist(config_settings)
    return [*found, *nvrtc.requirements()]
