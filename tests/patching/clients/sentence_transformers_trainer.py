"""sentence-transformers' trainer on a small BERT with a vocabulary of its own."""

import sys

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from transformers import BertConfig, BertModel, BertTokenizerFast, set_seed

WORDS = """a the cat dog bird sat ran flew on under over mat tree house is was"""
WORDS = WORDS.split()
with open("vocab.txt", "w") as file:
    file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))

set_seed(7)
config = BertConfig(
    vocab_size=len(WORDS) + 5,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
    attention_probs_dropout_prob=0.0,
)
BertModel(config).save_pretrained("bert")
BertTokenizerFast("vocab.txt").save_pretrained("bert")
word = models.Transformer("bert", max_seq_length=16)
pooling = models.Pooling(word.get_embedding_dimension())
model = SentenceTransformer(modules=[word, pooling, models.Normalize()], device="cpu")

sentences = [
    f"the {animal} {verb} {where} the {place}"
    for animal in ("cat", "dog", "bird")
    for verb in ("sat", "ran", "flew")
    for where in ("on", "under", "over")
    for place in ("mat", "tree", "house")
]
pairs = Dataset.from_dict(
    {"anchor": sentences[:-1], "positive": [s[4:] for s in sentences[1:]]}
)
arguments = SentenceTransformerTrainingArguments(
    output_dir="run",
    max_steps=8,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    warmup_steps=2,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = SentenceTransformerTrainer(
    model=model,
    args=arguments,
    train_dataset=pairs,
    loss=losses.MultipleNegativesRankingLoss(model),
)
trainer.train()
model.eval()
vectors = model.encode(sentences[:4], convert_to_tensor=True, show_progress_bar=False)
print(model.similarity(vectors, vectors), file=sys.stderr)
torch.save(
    {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "vectors": vectors,
        "model": model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
    },
    "final.pt",
)
