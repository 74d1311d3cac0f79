"""Signatures of messages, by Standard Webhooks (https://www.standardwebhooks.com)."""

import base64
import hashlib
import hmac

PREFIX = "whsec_"


def headers(secret: str, message_id: str, body: str, *, now: float) -> dict[str, str]:
    """Headers by which the receiver knows the sender, the message, and the moment of the attempt."""
    moment = str(int(now))
    return {
        "webhook-id": message_id,
        "webhook-timestamp": moment,
        "webhook-signature": f"v1,{signature(secret, message_id, moment, body)}",
    }


def signature(secret: str, message_id: str, moment: str, body: str) -> str:
    """HMAC-SHA256 of the id, the moment and the body, in Base64."""
    key = base64.b64decode(secret.removeprefix(PREFIX))
    signed = f"{message_id}.{moment}.{body}".encode()
    return base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
