"""Whether two vocabularies can be one: tables differ in rows of padding, tokenizers in more than that."""

#: Rows of padding that are tolerated, and the share of a table they may be: published tables of one tokenizer
#: are padded to multiples of up to 512.
PADDING_ROWS, PADDING_SHARE = 512, 8


def check_vocab(method: str, rows: int, target_rows: int) -> None:
    """ValueError when the drafter's table of ``rows`` cannot belong to the target's tokenizer."""
    larger, difference = max(rows, target_rows), abs(rows - target_rows)
    if difference > min(PADDING_ROWS, larger // PADDING_SHARE):
        raise ValueError(
            f"the {method} drafter was made for a vocabulary of {rows} tokens, the target's has {target_rows}: that is "
            "more than padding, so they do not share a tokenizer"
        )
