"""The text export of a WhatsApp chat (`_chat.txt`), as Android and iPhones write it in many languages.

12/31/23, 9:05 PM - Anna: text          Android
[31.12.23, 21:05:10] Anna: text         iPhone; a hidden mark (U+200E) begins a text that WhatsApp itself wrote
"""

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from tunewell.core.errors import UserError
from tunewell.data.rows.json_rows import text_of
from tunewell.data.sources.base import SourceFile
from tunewell.data.sources.blocks import ReadOptions
from tunewell.data.sources.exports.turns import ChatMessage, chat_rows
from tunewell.data.sources.lines import TooLong, numbered_lines

_HIDDEN = re.compile("[\u200e\u200f\u202a\u202c\ufeff]")
_LINE = re.compile(
    r"\[?(?P<a>\d{1,4})[./-](?P<b>\d{1,2})[./-](?P<c>\d{2,4}),?\s(?P<hour>\d{1,2})[:.](?P<minute>\d{2})(?:[:.]\d{2})?"
    r"(?:\s?(?P<half>[ap])\.?\s?m\.?)?(?:\]|\s-)\s(?P<rest>.*)",
    re.IGNORECASE,
)
# The first line of a message with a file. A caption may follow.
_MEDIA = re.compile(
    r"<[^<>]*(?:omitted|ausgeschlossen|weggelassen|omitid[oa]s?|omis|weggelaten|omess[io]|oculta)[^<>]*>"
    r"|<(?:attached|Anhang|adjunto|pièce jointe|allegato|anexado|bijgevoegd)\s?: [^<>]*>"
    r"|(?:image|video|audio|sticker|GIF|document|contact card|photo) omitted"
    r"|(?:Bild|Video|Audio|Sticker|GIF|Dokument|Kontaktkarte) (?:weggelassen|ausgelassen)"
    r"|.+\((?:file attached|Datei angehängt|archivo adjunto|fichier joint|file allegato|arquivo anexado"
    r"|ficheiro anexado|bestand bijgevoegd)\)",
    re.IGNORECASE,
)
_DELETED = re.compile(
    r"(?:This message was deleted|You deleted this message|This message was deleted by admin .*"
    r"|Diese Nachricht wurde gelöscht|Du hast diese Nachricht gelöscht"
    r"|Se eliminó este mensaje|Este mensaje fue eliminado|Eliminaste este mensaje"
    r"|Ce message a été supprimé|Vous avez supprimé ce message"
    r"|Questo messaggio è stato eliminato|Hai eliminato questo messaggio"
    r"|Mensagem apagada|Esta mensagem foi apagada|Você apagou esta mensagem"
    r"|Dit bericht is verwijderd|Dit bericht werd verwijderd|Je hebt dit bericht verwijderd)\.?"
)
_CALL = re.compile(
    r"(?:Missed (?:group )?(?:voice |video )?call"
    r"|Verpasster (?:Gruppen-?)?(?:Sprach|Video)?anruf|Llamada(?: de voz)? perdida|Videollamada perdida"
    r"|Appel (?:vocal|vidéo) manqué|(?:Chiamata(?: vocale)?|Videochiamata) persa"
    r"|Chamada de (?:voz|vídeo) perdida|Gemiste (?:spraak|video-?)oproep|Gemist videogesprek)"
    r"(?: (?:at|um|a las|à|alle|às|om) [\d:.]+(?: ?[ap]m)?)?\.?(?: (?:Tap to call back|Zum Zurückrufen tippen)\.?)?"
    r"|(?:Voice call|Video call|Sprachanruf|Videoanruf)[.,] "
    r"(?:\d+ ?(?:s|sec|sek|min|h|hr|std)\b.{0,20}|No answer|Keine Antwort)",
    re.IGNORECASE,
)
_EDITED = re.compile(r"\s*<[^<>\n]*(?:edited|bearbeitet|editó|editad[oa]|modifié|modificato|bewerkt)[^<>\n]*>\Z")


def read(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    """Yield the parts of the chat, numbered by their first line."""
    messages = _messages(file, options)
    return chat_rows(messages, "whatsapp", file.name, options=options)


def _messages(file: SourceFile, options: ReadOptions) -> list[ChatMessage]:
    entries: list[tuple[int, re.Match[str], bool, list[str]]] = []
    for number, line in numbered_lines(file, options):
        raw = "" if isinstance(line, TooLong) else text_of(line).replace("\u202f", " ")
        text = _HIDDEN.sub("", raw)
        if match := _LINE.fullmatch(text):
            is_notice = raw.partition(": ")[2].startswith("\u200e")
            entries.append((number, match, is_notice, [match["rest"]]))
        elif entries:
            entries[-1][-1].append(text)
        elif text.strip():
            raise UserError(f"`{file.name}` is not a WhatsApp chat", where=f"line {number}: {text[:60]!r}")
    is_month_first = _is_month_first([match for _, match, *_ in entries])
    messages: list[ChatMessage] = []
    for number, match, is_notice, lines in entries:
        sender, colon, text = _EDITED.sub("", "\n".join(lines).rstrip("\n")).partition(": ")
        if not colon or "\n" in sender:
            if not _CALL.fullmatch(sender.strip()):
                continue  # a notice: "Messages are end-to-end encrypted", "Anna changed the subject"
            sender, text = "", sender
        left_out = _left_out(text.strip())
        if is_notice and not left_out:
            continue
        time = _time(match, is_month_first, f"{file.name} line {number}")
        messages.append(ChatMessage(number, time, sender, text, left_out))
    return messages


def _left_out(text: str) -> str:
    """Return the name of the note for a text that WhatsApp wrote instead of a message, or an empty text."""
    if _DELETED.fullmatch(text):
        return "deleted_messages_left_out"
    if _CALL.fullmatch(text):
        return "calls_left_out"
    return "media_left_out" if _MEDIA.fullmatch(text.partition("\n")[0].strip()) else ""


def _is_month_first(dates: list[re.Match[str]]) -> bool:
    """Return True if the month is before the day: a second number above 12, or AM and PM without a first above 12."""
    if any(int(date["a"]) > 12 for date in dates):
        return False
    return any(int(date["b"]) > 12 or date["half"] for date in dates)


def _time(date: re.Match[str], is_month_first: bool, where: str) -> datetime:
    first, second, third = int(date["a"]), int(date["b"]), int(date["c"])
    hour = int(date["hour"])
    if date["half"]:
        hour = hour % 12 + (12 if date["half"].lower() == "p" else 0)
    if first > 31:
        year, month, day = first, second, third
    else:
        year = third + 2000 if third < 100 else third
        month, day = (first, second) if is_month_first else (second, first)
    try:
        return datetime(year, month, day, hour, int(date["minute"]))
    except ValueError as error:
        raise UserError(f"not a date: {date[0][:20]!r}", where=where, fix="export the chat again") from error
