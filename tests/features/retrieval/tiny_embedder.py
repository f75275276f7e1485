"""A sentence-transformers folder with a tiny BERT, for commands that index in a process of their own."""

import json
from pathlib import Path

import torch
from tiny import SENTENCES
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel


def write_tiny_embedder(folder: Path) -> Path:
    """Write an encoder of one layer with mean pooling, and return its folder."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    marks, alphabet = ["[CLS]", "[SEP]"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=marks, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=256, **size)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256}))
    return folder
