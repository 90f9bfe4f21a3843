"""Small inputs that look like the real ones."""

import json

GSM8K_LIKE = [
    ("Ann has 3 pens and buys 4. How many now?", "3+4 = <<3+4=7>>7 pens.\n#### 7"),
    ("A car costs $12,000 and loses 500. What is it worth?", "12000-500 = 11500.\n#### 11,500"),
    ("It is 2 degrees and drops by 5. How cold is it?", "2-5 = -3.\n#### -3"),
    ("Half of 5 litres?", "5/2 = <<5/2=2.5>>2.5 litres.\n#### 2.5"),
    ("Twice 0?", "Nothing.\n#### 0"),
    ("How many are 'über' 10 – say, 10 + 1?", "10+1 = 11.\n#### 11"),
]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def gsm8k_rows(copies=1):
    return [
        {"question": f"{question} (variant {copy})", "answer": answer}
        for copy in range(copies)
        for question, answer in GSM8K_LIKE
    ]
