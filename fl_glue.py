"""Federated training of language models on GLUE with the flags of the published RaFFM script.

python fl_glue.py --method raffm --spp --model distilbert --save_dir log/sst2 --dataset sst2 --num_clients 100 --lr 5e-5

Every task of GLUE and every model of a known family will do; texts are padded to the longest of their batch, and the server's
model is judged by the task's own metric. `--peft` trains adapters alone.
"""

from __future__ import annotations

from fl_vit import arguments, run

MODELS = {
    "bert-base": "google-bert/bert-base-uncased",
    "bert-large": "google-bert/bert-large-uncased",
    "roberta": "FacebookAI/roberta-base",
    "roberta-large": "FacebookAI/roberta-large",
    "distilbert": "distilbert/distilbert-base-uncased",
    "t5": "google/flan-t5-base",
    "t5-small": "google/flan-t5-small",
}

if __name__ == "__main__":
    run(arguments(str(__doc__), model="bert-base", save_dir="log_glue", dataset="sst2"), MODELS)
