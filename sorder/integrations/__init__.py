"""sorder inside other libraries. Each module imports the library it serves only when it is used."""

from sorder.integrations import huggingface

__all__ = ["huggingface"]
