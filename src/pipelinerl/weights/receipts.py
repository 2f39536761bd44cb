"""When is a receipt proof that the engine holds what was sent?"""

from __future__ import annotations

from pipelinerl.types import UpdateReceipt


def complaint(receipt: UpdateReceipt, version: int, checksum: str) -> str | None:
    """What is wrong with the receipt for the update (version, checksum), in words, or None."""
    if receipt.error is not None:
        return f"engine {receipt.engine!r} did not apply weights of version {version}: {receipt.error}"
    if receipt.version != version:
        return f"engine {receipt.engine!r} answered for version {receipt.version}, not {version}"
    if receipt.checksum != checksum:
        return (
            f"engine {receipt.engine!r} says it took weights of version {version}, but holds others: checksum "
            f"{receipt.checksum}, sent {checksum} (are its parameters of the same type as those sent?)"
        )
    return None
