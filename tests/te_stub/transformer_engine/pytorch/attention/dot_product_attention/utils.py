"""Installed versions of flash-attn."""


class FlashAttentionUtils:
    v4_is_installed = True
    v4_warning_printed = False
