"""Which module does a docstring come from? A small BERT and transformers' Trainer."""

import ast
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

MODULES = ("argparse", "decimal", "inspect", "pydoc", "statistics", "typing")


def docstrings():
    library = Path(sysconfig.get_path("stdlib"))
    for label, name in enumerate(MODULES):
        for node in ast.walk(ast.parse((library / f"{name}.py").read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                text = ast.get_docstring(node)
                if text:
                    yield text, label


class Docstrings(Dataset):
    def __init__(self, rows, tokenizer):
        texts, self.labels = zip(*rows)
        self.encodings = tokenizer(list(texts), truncation=True, max_length=256)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        row = {key: values[i] for key, values in self.encodings.items()}
        row["labels"] = self.labels[i]
        return row


def accuracy(prediction):
    logits, labels = prediction
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


set_seed(0)
rows = list(docstrings())
words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
words.train_from_iterator(
    (text for text, _ in rows),
    trainers.WordPieceTrainer(vocab_size=4000, special_tokens=special),
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
)

config = BertConfig(
    vocab_size=4000,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    num_labels=len(MODULES),
)
arguments = TrainingArguments(
    output_dir="bert_output",
    per_device_train_batch_size=8,
    learning_rate=5e-4,
    num_train_epochs=3,
    logging_steps=50,
    save_strategy="no",
    report_to=[],
)
split = len(rows) // 10
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=arguments,
    train_dataset=Docstrings(rows[split:], tokenizer),
    eval_dataset=Docstrings(rows[:split], tokenizer),
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=accuracy,
)
trainer.train()
print(trainer.evaluate())
