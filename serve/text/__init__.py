"""Text on its way to the model and back: tokenizers, chat templates, detokenisation, stop strings, output parsers.

Nothing here needs an accelerator or JAX.
"""

from serve.text.chat_template import encode_chat as encode_chat
from serve.text.chat_template import render_chat as render_chat
from serve.text.detokenize import IncrementalDetokenizer as IncrementalDetokenizer
from serve.text.detokenize import Piece as Piece
from serve.text.load import find_tokenizer as find_tokenizer
from serve.text.load import load_tokenizer as load_tokenizer
from serve.text.message import Delta as Delta
from serve.text.message import ParsedMessage as ParsedMessage
from serve.text.message import ToolCall as ToolCall
from serve.text.message import ToolCallDelta as ToolCallDelta
from serve.text.message import collect as collect
from serve.text.stop import StopStrings as StopStrings
from serve.text.tokenizer import Tokenizer as Tokenizer
from serve.text.tokenizer_settings import GenerationConfig as GenerationConfig
from serve.text.tokenizer_settings import read_generation_config as read_generation_config
