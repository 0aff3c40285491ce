import torch
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast


def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def rows(number):
    torch.manual_seed(1)
    return [{"input_ids": torch.randint(1, 40, (3 + k % 7,)).tolist()} for k in range(number)]


def tokenizer():
    words = Tokenizer(models.WordLevel({"<pad>": 0, **{f"t{i}": i for i in range(1, 40)}}, unk_token="t1"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="t1", unk_token="t1")
