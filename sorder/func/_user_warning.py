"""Warnings that point at the user's line."""

from __future__ import annotations

import os
import sys
import warnings

import torch

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSIDE = (_ROOT + os.sep, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn with the innermost line outside sorder and torch, which may be any number of frames away."""
    # Python 3.12 has skip_file_prefixes for this.
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
