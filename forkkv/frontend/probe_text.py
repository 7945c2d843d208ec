"""The text that adapters are probed with at load: a file of the user's, or the document below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkkv.errors import ConfigError

if TYPE_CHECKING:
    from forkkv.frontend.tokenizer import Tokenizer

PROBE_TOKENS = 512
"""Tokens of the text that are read; the last quarter of them is compared."""
_MAX_CHARS = 64 * PROBE_TOKENS
"""Read of a file: enough for any tokenizer, little of a large log."""


def probe_tokens(tokenizer: Tokenizer, file: str | None = None) -> list[int]:
    """The first `PROBE_TOKENS` tokens of `file` (UTF-8), or of the built-in document; fewer if it is shorter. Raises
    `ConfigError` for a file that cannot be read."""
    text = DOCUMENT if file is None else _read(file)
    return tokenizer.encode(text, add_special_tokens=True)[:PROBE_TOKENS]


def _read(file: str) -> str:
    try:
        with open(file, encoding="utf-8") as stream:
            return stream.read(_MAX_CHARS)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--probe-file {file}: {error}") from None


DOCUMENT = """\
Incident report 2291: delayed shipments from the northern warehouse

Summary. On Tuesday morning, 14 orders left the warehouse in Tromsø later than promised. No goods were lost. The cause \
was a label printer that stopped after a firmware update; the backlog was cleared by 16:40 the same day.

Timeline (local time)
06:05  The night shift hands over; all belts are running and the queue is empty.
06:31  The update service installs version 4.2.1 on printers P1 to P4. P3 does not come back.
07:55  Ingrid Dahl restarts P3 by hand. It prints two labels and stops again.
11:45  P3 runs version 4.1.9. The belt is opened again.

Log of the printer service
06:31:52 ERROR printer=P3 code=E17 message="head not calibrated" retry=1
06:33:02 FATAL printer=P3 code=E17 message="giving up after 2 retries"

Orders concerned
order  customer         items  weight_kg  promised  left   refund
70114  Berg & Sons          3       12.4  08:00     12:10  no
70117  Lofoten Fish AS     18      240.0  08:00     12:35  yes
70130  Nordlys Theatre      2        5.2  09:00     13:40  no

From the tickets
> "We open at nine and had nothing to serve. Please call us before noon next time, a mail is not enough."
> "Thank you for the quick answer. The parcel came one day later, which is fine."

What we change. Updates are installed on one printer first and on the others a day later. The warning goes to the \
shift lead and to the person on call. Customers with an order above 100 kg are called by phone. The owner of these \
three actions is Ingrid Dahl; they are due on 31 March.

Questions to the reader
1. Which order was the heaviest, and was its delivery fee refunded?
2. How long did printer P3 stand still, from the update until the belt was opened again?
3. Write a short answer to the customer of the first ticket. Name the cause in one sentence, and promise nothing that \
is not among the changes above.
"""
