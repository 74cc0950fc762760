"""The starter pack: a small base model and its experts, trained from nothing by these modules."""
