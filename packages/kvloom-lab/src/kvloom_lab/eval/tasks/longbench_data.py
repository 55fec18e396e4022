"""LongBench's data sets: the official prompts, answer lengths and metrics (arXiv:2308.14508)."""

from __future__ import annotations

from typing import NamedTuple

from .longbench_metrics import (
    Metric,
    classification,
    code_similarity,
    count,
    qa_f1,
    qa_f1_zh,
    retrieval,
    rouge_l,
    rouge_l_zh,
)

PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
"""Few-shot and code data sets: no chat template goes around their prompts."""
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
"""Data sets of which only the first line of an answer counts."""


class DataSet(NamedTuple):
    """A prompt with {context} and {input}, the most tokens of an answer, and its metric."""

    prompt: str
    tokens: int
    metric: Metric


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not "
    "output any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the "
    "question based on the given passages. Only give me the answer and do not output any "
    "other words.\n\nQuestion: {input}\nAnswer:"
)

DATA_SETS = {
    "narrativeqa": DataSet(
        "You are given a story, which can be either a novel or a movie script, and a question. "
        "Answer the question asconcisely as you can, using a single phrase if possible. Do not "
        "provide any explanation.\n\nStory: {context}\n\nNow, answer the question based on the "
        "story asconcisely as you can, using a single phrase if possible. Do not provide any "
        "explanation.\n\nQuestion: {input}\n\nAnswer:",
        128,
        qa_f1,
    ),
    "qasper": DataSet(
        "You are given a scientific article and a question. Answer the question as concisely as "
        "you can, using a single phrase or sentence if possible. If the question cannot be "
        'answered based on the information in the article, write "unanswerable". If the '
        'question is a yes/no question, answer "yes", "no", or "unanswerable". Do not '
        "provide any explanation.\n\nArticle: {context}\n\n Answer the question based on the "
        "above article as concisely as you can, using a single phrase or sentence if possible. "
        "If the question cannot be answered based on the information in the article, write "
        '"unanswerable". If the question is a yes/no question, answer "yes", "no", or '
        '"unanswerable". Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:',
        128,
        qa_f1,
    ),
    "multifieldqa_en": DataSet(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
        "question based on the above text, only give me the answer and do not output any other "
        "words.\n\nQuestion: {input}\nAnswer:",
        64,
        qa_f1,
    ),
    "multifieldqa_zh": DataSet(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n"
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n"
        "问题：{input}\n回答：",
        64,
        qa_f1_zh,
    ),
    "hotpotqa": DataSet(_PASSAGES, 32, qa_f1),
    "2wikimqa": DataSet(_PASSAGES, 32, qa_f1),
    "musique": DataSet(_PASSAGES, 32, qa_f1),
    "dureader": DataSet(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n"
        "问题：{input}\n回答：",
        128,
        rouge_l_zh,
    ),
    "gov_report": DataSet(
        "You are given a report by a government agency. Write a one-page summary of the "
        "report.\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\n"
        "Summary:",
        512,
        rouge_l,
    ),
    "qmsum": DataSet(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the "
        "query based on the above meeting transcript in one or more sentences.\n\nQuery: "
        "{input}\nAnswer:",
        512,
        rouge_l,
    ),
    "multi_news": DataSet(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        rouge_l,
    ),
    "vcsum": DataSet(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n"
        "会议总结：",
        512,
        rouge_l_zh,
    ),
    "trec": DataSet(
        "Please determine the type of the question below. Here are some examples of "
        "questions.\n\n{context}\n{input}",
        64,
        classification,
    ),
    "triviaqa": DataSet(
        "Answer the question based on the given passage. Only give me the answer and do not "
        "output any other words. The following are some examples.\n\n{context}\n\n{input}",
        32,
        qa_f1,
    ),
    "samsum": DataSet(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n{input}",
        128,
        rouge_l,
    ),
    "lsht": DataSet(
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}", 64, classification
    ),
    "passage_count": DataSet(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read these paragraphs and determine how many unique paragraphs there "
        "are after removing duplicates. In other words, how many non-repeating paragraphs are "
        "there in total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after "
        "removing duplicates. The output format should only contain the number, such as 1, 2, 3, "
        "and so on.\n\nThe final answer is: ",
        32,
        count,
    ),
    "passage_retrieval_en": DataSet(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n"
        "{input}\n\nPlease enter the number of the paragraph that the abstract is from. The "
        'answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        retrieval,
    ),
    "passage_retrieval_zh": DataSet(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n"
        "{context}\n\n下面是一个摘要\n\n{input}\n\n"
        '请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
        32,
        retrieval,
    ),
    "lcc": DataSet(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, code_similarity
    ),
    "repobench-p": DataSet(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        code_similarity,
    ),
}
