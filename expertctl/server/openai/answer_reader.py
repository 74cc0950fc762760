"""Where `expertctl.server.answer_reader` was."""

from expertctl.server.answer_reader import AnswerReader as AnswerReader
from expertctl.server.answer_reader import Read as Read
from expertctl.server.answer_reader import Reading as Reading
